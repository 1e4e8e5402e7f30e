--- te.optim.Muon: momentum made orthogonal (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural
--- networks"), and AdamW for what is no hidden layer's matrix.
--
-- Of a matrix with gradient g, all singular values of whose update are about 1:
--
--     m = momentum m + (1 - momentum) g          u = nesterov: momentum m + (1 - momentum) g; else m
--     w = w - lr (f orthogonalize(u) + weight_decay w)      f: adjust_lr_fn, of its shape
--
-- orthogonalize(u) is U V^T of the singular value decomposition U S V^T of u, nearly: Newton and Schulz's iteration
--
--     X = u / |u|        ns_steps times: A = X X^T, X = a X + (b A + c A A) X        a, b, c: ns_coefficients
--
-- moves the singular values of X, at most 1, to between about 0.7 and 1.2. A tensor of more dimensions is a matrix for
-- each place in the first ones, as the weights of experts are. Matrices of one shape are multiplied together.
--
-- Of a matrix that is split between processes (te.distributed.whole) all have the whole direction made orthogonal, and
-- each moves its part.
--
-- Where use_muon of a group is switched, what it has not kept before is zero at first, and AdamW counts its steps from
-- one; what it has kept it goes on with.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local AdamW = require "te.optim.adamw"
local Optimizer = require "te.optim.optimizer"
local whole = require "te.distributed.whole"
local core = te._core

local function wrong_coefficients(list)
    for i = 1, 3 do
        local c = list[i]
        if type(c) ~= "number" or c ~= c or math.abs(c) == math.huge then
            return ("ns_coefficients[%d]: expected a finite number, got %s"):format(i, tostring(c))
        end
    end
    if #list > 3 then return ("ns_coefficients: expected three numbers, got %d"):format(#list) end
end

local ADJUST = { "original", "match_rms_adamw" }

local Muon = Optimizer.define("Muon", {
    use_muon = { "boolean", true, help = "false: AdamW updates the group, as embeddings, heads and vectors want" },
    momentum = { "number", 0.95, min = 0, below = 1, help = "decay rate of the mean of gradients" },
    nesterov = { "boolean", true, help = "looks one update ahead" },
    weight_decay = { "number", 0.1, min = 0, wrong = Optimizer.finite "weight_decay",
        help = "a step subtracts lr * weight_decay * weight" },
    ns_steps = { "integer", 5, min = 1, max = 100, help = "Newton-Schulz iterations" },
    ns_coefficients = { "table", { 3.4445, -4.775, 2.0315 }, wrong = wrong_coefficients,
        help = "of X, A X and A A X in an iteration" },
    ns_dtype = { "string", "bfloat16", choices = { "bfloat16", "float32" }, help = "what the iterations compute in" },
    ns_eps = { "number", 1e-7, min = 0, wrong = Optimizer.finite "ns_eps", help = "least norm to divide by" },
    adjust_lr_fn = { "string", "original", choices = ADJUST, help = "factor of lr for a matrix {n, m}: original: "
        .. "sqrt(max(1, n / m)); match_rms_adamw: 0.2 sqrt(max(n, m)), for rates and weight decays of AdamW "
        .. "(Liu et al. 2025)" },
    betas = AdamW.declared.betas,
    eps = AdamW.declared.eps,
}, function(group) return group.use_muon and { "momentum_buffer" } or AdamW.slots(group) end)

--- Raises where a group with these options has what is no matrix.
function Muon.takes(who, group, params)
    for i, parameter in ipairs(group.use_muon and params or {}) do
        if parameter:dim() < 2 then
            fail("%s: parameter %d of a group has shape %s, which is no matrix; with use_muon = false AdamW updates "
                .. "a group", who, i, options.shape(parameter))
        end
    end
end

--- What a state must hold follows from this.
function Muon.essential(group) return { use_muon = group.use_muon } end

function Muon.describe(group, batch)
    if not group.use_muon then
        if batch.fresh then batch.step = 1 end -- means that begin anew are counted anew: use_muon was switched
        return { adamw = AdamW.describe(group, batch) }
    end
    return { batch = batch, group = group }
end

-- Orthogonalizing ---------------------------------------------------------------------------------------------------

local direction = core.define("muon_direction(m, g; keep: number = 0, share: number = 0, nesterov: number = 0)",
    "new = keep * m + share * g; u = where(nesterov > 0, keep * new + share * g, new)", { outputs = "u" })
local mix = core.define("muon_mix(a, b; p: number = 1, q: number = 1)", "y = p * a + q * b")

-- X {count, n, m}, n at most m.
local function iterate(x, group)
    local a, b, c = unpack(group.ns_coefficients)
    for _ = 1, group.ns_steps do
        local square = te.matmul(x, x:transpose(2, 3))
        local fourth, before = te.matmul(square, square), x
        local polynomial = mix(square, fourth, { p = b, q = c })
        local product = te.matmul(polynomial, x)
        x = mix(before, product, { p = a })
        for _, t in ipairs { square, fourth, polynomial, product, before } do t:release() end
    end
    return x
end

-- Of directions {count, n, m}, in the dtype of the iterations.
local function orthogonal(u, group)
    if u:numel() == 0 then return u end
    local norm = te.sqrt(te.sum(te.square(u), { 2, 3 }, true))
    local x = (u / te.clamp(norm, { min = math.max(group.ns_eps, 1e-38) })):to(group.ns_dtype)
    if u:size(2) <= u:size(3) then return iterate(x, group) end
    return iterate(x:transpose(2, 3):contiguous(), group):transpose(2, 3)
end

-- How many matrices a tensor of this shape is.
local function matrices(shape)
    local count = 1
    for d = 1, #shape - 2 do count = count * shape[d] end
    return count
end

-- The directions of matrices of one shape, one below the other; momentum buffers stay as they are.
local function directions(list, group, grad_scale)
    local rows = {}
    for i, entry in ipairs(list) do
        local keep = group.momentum
        local u = direction(entry.buffer, entry.grad,
            { keep = keep, share = (1 - keep) * grad_scale, nesterov = group.nesterov and 1 or 0 })
        u = whole.join(entry.parameter, u)
        rows[i] = u:view { matrices(u.shape), u:size(-2), u:size(-1) }
    end
    return #rows == 1 and rows[1] or te.cat(rows, 1)
end

-- The matrices of a batch by shape.
local function by_shape(batch)
    local lists, order = {}, {}
    for i, parameter in ipairs(batch.params) do
        local shape = whole.shape(parameter)
        local n, m = shape[#shape - 1], shape[#shape]
        local key = n .. " " .. m
        if not lists[key] then
            lists[key] = { n = n, m = m }
            order[#order + 1] = lists[key]
        end
        table.insert(lists[key], { parameter = parameter, buffer = batch.momentum_buffer[i], grad = batch.grads[i],
            master = batch.masters and batch.masters[i], state = batch.states[i] })
    end
    return order
end

local function factor(group, n, m)
    if group.adjust_lr_fn == "original" then return math.sqrt(math.max(1, n / math.max(m, 1))) end
    return 0.2 * math.sqrt(math.max(n, m))
end

-- Matrices of one shape as a group of SGD without momentum, whose gradients are their updates.
local function as_sgd(list, group, batch)
    local all, first = orthogonal(directions(list, group, batch.grad_scale), group), 1
    local sgd = { params = {}, grads = {}, masters = batch.masters and {}, states = {}, step = batch.step,
        lr = batch.lr, weight_decay = group.weight_decay, grad_scale = factor(group, list.n, list.m) }
    for i, entry in ipairs(list) do
        local shape = whole.shape(entry.parameter)
        local count = matrices(shape)
        sgd.params[i], sgd.states[i] = entry.parameter, entry.state
        local update = all:narrow(1, first, count):contiguous():view(shape)
        sgd.grads[i] = whole.split(entry.parameter, update):contiguous()
        if sgd.masters then sgd.masters[i] = entry.master end
        first = first + count
    end
    return sgd
end

local function keep_momentum(described)
    local group, batch = described.group, described.batch
    local one = te.ones({}, { device = batch.params[1].device })
    for i, buffer in ipairs(batch.momentum_buffer) do
        buffer:mul_(group.momentum)
        buffer:addcmul_(batch.grads[i], one, { value = (1 - group.momentum) * batch.grad_scale })
    end
end

--- All updates are there before any parameter or state changes.
function Muon.update(list)
    local sgd, adamw = {}, {}
    te.no_grad(te.autocast, { enabled = false }, function()
        for _, described in ipairs(list) do
            if described.adamw then adamw[#adamw + 1] = described.adamw end
            for _, alike in ipairs(described.batch and by_shape(described.batch) or {}) do
                sgd[#sgd + 1] = as_sgd(alike, described.group, described.batch)
            end
        end
        if sgd[1] then core.sgd_step(sgd) end
        if adamw[1] then core.adamw_step(adamw) end
        for _, described in ipairs(list) do
            if described.batch then keep_momentum(described) end
        end
    end)
end

return Muon
