--- Random containers for the fuser's specs: chains of mixed operations, branches and callables that split groups.

local te = require "te"

-- A fixed generator of its own: what a seed gives does not depend on how often the engine drew.
local function generator(seed)
    local state = seed % 2147483647 + 1
    return function(n)
        state = state * 48271 % 2147483647
        return n and state % n + 1 or state / 2147483647
    end
end

local Double = te.BasicOperation:extend("Double")
function Double:op_forward(ctx, x)
    ctx:save_for_backward(x)
    return x * x
end
function Double:op_backward(ctx, dy) return dy * 2 * ctx:saved_tensors() end

local Mix = {}
Mix.__index = Mix

function Mix:width() return 8 * self.random(3) end

local function product(sizes)
    local n = 1
    for _, size in ipairs(sizes) do n = n * size end
    return n
end

-- Rows of width w in another shape; mostly of another width too. Returns that.
function Mix:reshape(list, w)
    local rows, width, choice = product(self.lead), w, self.random(3)
    if choice == 2 and w % 16 == 0 and rows <= 2 * self.rows then width = w / 2 end
    if choice == 3 and rows % 2 == 0 then width = 2 * w end
    local n = rows * w / width
    local lead = ({ { n }, { n, 1 }, n % 2 == 0 and { 2, n / 2 } or { 1, n } })[self.random(3)]
    local shape = { unpack(lead) }
    if self.random(2) == 1 then shape[self.random(#shape)] = -1 end
    shape[#shape + 1] = width
    list[#list + 1], self.lead = te.Reshape(shape), lead
    return width
end

-- Rows of width `from` as they were before: in that shape, of width w.
function Mix:reshape_back(list, from, lead, w)
    if self.lead == lead then return end
    local width = product(lead) * w / product(self.lead)
    if from ~= width then
        list[#list + 1] = te.Linear(from, width, { params_dtype = self.dtype, init_method = self.init })
    end
    local shape = { unpack(lead) }
    if self.random(2) == 1 then shape[1] = -1 end
    shape[#shape + 1] = w
    list[#list + 1], self.lead = te.Reshape(shape), lead
    return true
end

-- Packed sequences lie in their tokens, so what knows sequences stands where nothing is reshaped. A token that attends
-- to itself alone has scores whose gradient cancels to nothing: what is left is noise, which no tolerance bounds.
function Mix:has_sequences()
    if not self.lens then return self.lead[#self.lead] > 1 end
    self.takes_lens = self.takes_lens or self.lead == self.first_lead
    return self.lead == self.first_lead
end

-- Each entry appends to `list` and returns the new width.
local PIECES = {
    function(m, list, w)
        list[#list + 1] = te.LayerNorm(w, { params_dtype = m.dtype, bias = m.random(2) == 1 })
        return w
    end,
    function(m, list, w) list[#list + 1] = te.RMSNorm(w, { params_dtype = m.dtype }) return w end,
    function(_, list, w) list[#list + 1] = te.L2Normalization() return w end,
    function(m, list, w)
        list[#list + 1] = te.GELU({ approximate = m.random(2) == 1 and "tanh" or "none" })
        return w
    end,
    function(m, list, w) list[#list + 1] = ({ te.SiLU, te.ReLU, te.SReLU, te.QuickGELU })[m.random(4)]() return w end,
    function(m, list, w) list[#list + 1] = te.Dropout(0.25 * m.random(3)) return w end,
    function(m, list, w) list[#list + 1] = te.ConstantScale(m.random() * 2 - 1) return w end,
    function(m, list, w) list[#list + 1] = te.Bias(w, { params_dtype = m.dtype }) return w end,
    function(_, list, w) list[#list + 1] = te.Identity() return w end,
    function(m, list, w)
        local out = m:width()
        list[#list + 1] = te.Linear(w, out, { bias = m.random(3) > 1, params_dtype = m.dtype, init_method = m.init })
        return out
    end,
    function(m, list, w)
        list[#list + 1] = te.Linear(w, 16, { params_dtype = m.dtype, init_method = m.init })
        list[#list + 1] = ({ te.SwiGLU, te.GLU, te.ReGLU, te.GEGLU })[m.random(4)]()
        return 8
    end,
    function(m, list, w)
        if not m:has_sequences() then return w end
        list[#list + 1] = te.MultiHeadedSelfAttention(w, 2, { params_dtype = m.dtype, causal = m.random(2) == 1,
            init_method = m.init })
        return w
    end,
    function(m, list, w)
        local branch, lead = {}, m.lead
        local out = m:chain(branch, w, m.random(4))
        if m:reshape_back(branch, out, lead, w) then out = w end
        if out ~= w then branch[#branch + 1] = te.Linear(out, w, { params_dtype = m.dtype, init_method = m.init }) end
        list[#list + 1] = te.Residual(unpack(branch))
        return w
    end,
    function(m, list, w)
        local branches = {}
        for i = 1, 2 do
            branches[i] = {}
            local lead, out = m.lead, m:chain(branches[i], w, m.random(3))
            if m:reshape_back(branches[i], out, lead, w) then out = w end
            table.insert(branches[i], te.Linear(out, w, { params_dtype = m.dtype, init_method = m.init }))
            branches[i] = te.Sequential(unpack(branches[i]))
        end
        list[#list + 1] = te.Residual(branches[1], branches[2], { parallel = true })
        return w
    end,
    function(m, list, w)
        local inner = {}
        local out = m:chain(inner, w, m.random(3))
        list[#list + 1] = te.Sequential(unpack(inner))
        return out
    end,
    function(m, list, w)
        list[#list + 1] = ({ te.LayerNorm, te.RMSNorm })[m.random(2)](w,
            { params_dtype = m.dtype, zero_centered_gamma = true })
        return w
    end,
    function(m, list, w)
        list[#list + 1] = te.Linear(w, 16, { params_dtype = m.dtype, init_method = m.init })
        list[#list + 1] = ({ te.ClampedSwiGLU, te.SiTUGLU, te.QGEGLU, te.SReGLU })[m.random(4)]()
        return 8
    end,
    function(m, list, w)
        list[#list + 1] = te.Linear(w, 16, { params_dtype = m.dtype, init_method = m.init })
        list[#list + 1] = ({ te.SwiGLU, te.ClampedSwiGLU,
            te.SiTUGLU })[m.random(3)]({ glu_interleave_size = ({ 1, 2, 4, 8 })[m.random(4)] })
        return 8
    end,
    function(m, list, w)
        list[#list + 1] = te.Pointwise({ params = { g = te.ones({ w }, { dtype = m.dtype }),
            s = te.ones({}, { dtype = m.dtype }) } },
            function(x, p) return te.where(te.lt(x, p.s), te.tanh(x) * p.g, x - p.g) end)
        return w
    end,
    function(m, list, w)
        list[#list + 1] = te.Pointwise(function(x)
            local d = x - te.mean(x, -1, true)
            return d / (1 + te.max(te.abs(d), -1, true))
        end)
        return w
    end,
    function(m, list, w)
        m:extra(w)
        list[#list + 1] = te.Pointwise({ extra_inputs = 1 }, function(x, e) return x * te.sigmoid(e) + 0.5 * e end)
        return w
    end,
    function(m, list, w)
        m:extra()
        list[#list + 1] = te.Linear(w, 16, { params_dtype = m.dtype, init_method = m.init })
        list[#list + 1] = ({ te.ScaledSReLU, te.ScaledSwiGLU, te.ScaledSiTUGLU, te.ScaledClampedQGeGLU })[m.random(4)]()
        return te.is(list[#list], te.ScaledSReLU) and 16 or 8
    end,
    function(m, list, w)
        if m:has_sequences() then list[#list + 1] = te.StochasticDepth(0.25 * m.random(3)) end
        return w
    end,
    function(m, list, w)
        local lead, out = m.lead, m:reshape(list, w)
        if not m.lens then return out end
        out = m:chain(list, out, m.random(3))
        return m:reshape_back(list, out, lead, w) and w or out
    end,
    function(m, list, w)
        list[#list + 1] = te.Pointwise(function(x) return te.tanh(x), x * x end)
        return w
    end,
    function(m, list, w)
        local out, sizes, left = m:width(), {}, m.lead[1]
        for i = 1, m.random(3) do sizes[i] = m.random(left + 1) - 1 left = left - sizes[i] end
        sizes[#sizes + 1] = left
        m.extras[#m.extras + 1] = { sizes = sizes }
        local choice = m.random(3)
        if choice == 3 then m:extra() end
        list[#list + 1] = te.GroupedLinear(#sizes, w, out,
            { bias = choice > 1, scale_bias = choice == 3, params_dtype = m.dtype,
            init_method = m.init })
        return out
    end,
    function(m, list, w)
        list[#list + 1] = te.MakeExtraOutput({ channel = "c" .. #list })
        local name = "c" .. (#list - 1)
        list[#list + 1] = te.GELU()
        list[#list + 1] = te.AddExtraInput({ channel = name, in_place = true })
        return w
    end,
    function(_, list, w) list[#list + 1] = te.MakeExtraOutput() return w end,
    function(m, list, w)
        m:extra(w)
        list[#list + 1] = te.AddExtraInput()
        return w
    end,
    function(_, list, w) list[#list + 1] = function(x) return x * 0.5 end return w end,
    function(_, list, w) list[#list + 1] = Double() return w end,
}

-- One more input beside the rows where the container is at: of w columns, or one number per row.
function Mix:extra(w)
    local shape = { unpack(self.lead) }
    shape[#shape + 1] = w
    self.extras[#self.extras + 1] = shape
end

function Mix:chain(list, w, n)
    for _ = 1, n do w = PIECES[self.random(#PIECES)](self, list, w) end
    return w
end

local function randomize(module, random)
    for _, p in ipairs(module:parameters()) do
        te.no_grad(function() p:copy_(te.randn(p.shape, { dtype = "float32" }) * 0.5 + (random(2) - 1)) end)
    end
end

--- A random container, its inputs, and the dtypes: { module =, inputs = { x, [seq_lens], extras …
--- }, dtype =, autocast = }.
return function(seed)
    local random = generator(seed)
    for _ = 1, 4 do random() end
    te.manual_seed(seed)
    local mix = setmetatable({ random = random, extras = {} }, Mix)
    mix.dtype = ({ "float32", "float64", "bfloat16", "float32" })[random(4)]
    mix.init = te.initializers.normal(0, 0.3)
    local autocast = mix.dtype == "float32" and random(3) == 1 and "bfloat16" or nil
    local lead, lens
    if random(2) == 1 then
        lead = { random(3), random(5) }
    else
        lead = { 4 + random(4) }
        if random(2) == 1 then lens = te.tensor({ 1, lead[1] - 3, 2 }, { dtype = "int32" }) end
    end
    mix.lead, mix.first_lead, mix.rows, mix.lens = lead, lead, product(lead), lens
    local list, w = {}, mix:width()
    local embeds = random(6) == 1
    if embeds then list[1] = te.Embedding(5, w, { params_dtype = mix.dtype, init_method = mix.init }) end
    mix:chain(list, w, 1 + random(8))
    local module = te.Sequential(unpack(list))
    randomize(module, random)

    local function activation(shape)
        local t = te.randn(shape, { dtype = "float32" }):to(mix.dtype):detach()
        t.requires_grad = random(4) > 1
        return t
    end
    local inputs = { embeds and te.randint(0, 4, lead, { dtype = "int32" })
        or activation { lead[1], lead[2] or w, lead[2] and w } }
    if mix.takes_lens then inputs[2] = lens end
    for _, extra in ipairs(mix.extras) do
        inputs[#inputs + 1] = extra.sizes and te.tensor(extra.sizes, { dtype = "int32" }) or activation(extra)
    end
    return { module = module, inputs = inputs, dtype = mix.dtype, autocast = autocast, random = random }
end
