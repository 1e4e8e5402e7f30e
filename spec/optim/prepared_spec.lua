-- AdamW keeps its step prepared: the next one must be the same as one that was read from the
-- tables anew, whatever changed.

local te = require "te"

local SHAPES = { { 3 }, { 2, 2 }, { 5 }, { 1 } }

local function optimizer(options)
    te.manual_seed(3)
    local params = {}
    for i, shape in ipairs(SHAPES) do
        params[i] = te.randn(shape, { dtype = i == 4 and "bfloat16" or "float32", requires_grad = true })
    end
    local groups = { { params = { params[1], params[2] }, weight_decay = 0.1 }, { params = { params[3], params[4] } } }
    return te.optim.AdamW(groups, options or { lr = 0.01 }), params
end

local function set_grads(params, step, without)
    for i, p in ipairs(params) do
        p.grad = i ~= without and te.full(p.shape, math.sin(step * i), { dtype = p.dtype }) or nil
    end
end

local function values(opt, params)
    local list = {}
    for i, p in ipairs(params) do
        local state = opt.state[p] or {}
        list[i] = { p:totable(), state.step or 0, state.exp_avg and state.exp_avg:totable() or 0,
            state.exp_avg_sq and state.exp_avg_sq:totable() or 0, state.master and state.master:totable() or 0 }
    end
    return list
end

-- Runs `change(opt, params, step)` before each of eight steps, prepared and anew, and compares everything.
local function compare(change, options)
    local one, one_params = optimizer(options)
    local two, two_params = optimizer(options)
    local short = 0
    for step = 1, 8 do
        set_grads(one_params, step)
        set_grads(two_params, step)
        local opts = change(one, one_params, step)
        change(two, two_params, step)
        two.memory = nil
        local before = one.memory
        one:step(opts)
        two:step(opts)
        if before and one.memory == before then short = short + 1 end
        assert.same(values(two, two_params), values(one, one_params))
    end
    return short
end

describe("a prepared AdamW step", function()
    it("is taken while nothing changes", function()
        assert.equal(7, compare(function() end))
        assert.equal(7, compare(function() end, { lr = 0.01, master_weights = true }))
    end)

    it("follows options", function()
        assert.equal(7, compare(function(opt, _, step)
            opt.groups[1].lr = 0.01 * step
            opt.groups[2].betas[1] = 0.5 + 0.05 * step
            opt.groups[2].weight_decay = 0.1 * step
            return step % 2 == 0 and { grad_scale = 0.5, lr = 0.3 } or nil
        end))
    end)

    it("gives way when a group asks for masters", function()
        assert.equal(4, compare(function(opt, _, step)
            if step == 3 then opt.groups[2].master_weights = true end
            if step == 4 then assert.is_not_nil(opt.state[opt.groups[2].params[2]].master) end
            if step >= 6 then opt.groups[2].master_dtype = step == 6 and "bfloat16" or "float32" end
        end)) -- all but the first, the third, the sixth and the seventh
    end)

    it("multiplies by lr_scale as one that is made anew does", function()
        assert.equal(7, compare(function(opt, _, step)
            opt.groups[2].lr_scale = 1 / step
            return step % 2 == 0 and { lr = 0.02 } or nil
        end))
    end)

    it("gives way when a gradient comes or goes", function()
        assert.equal(5, compare(function(_, params, step)
            if step >= 3 and step <= 5 then params[2].grad = nil end
        end)) -- all but the first, the third and the sixth
        compare(function(_, params, step) if step % 2 == 0 then params[step / 2].grad = nil end end)
    end)

    it("gives way when states, parameters or groups are replaced", function()
        compare(function(opt, params, step)
            local state = opt.state[params[1]]
            if step == 3 then state.exp_avg = te.zeros(params[1].shape) end
            if step == 4 then state.step = 20 end
            if step == 5 then opt.state[params[3]] = nil end
            if step == 6 then opt.groups[2].params[3] = te.ones({ 2 }, { requires_grad = true }) end
            if step == 7 then table.remove(opt.groups[2].params, 1) end
            if step == 8 then table.remove(opt.groups, 1) end
        end)
    end)

    it("follows load_state_dict", function()
        local saved
        compare(function(opt, _, step)
            if step == 4 then opt:load_state_dict(opt:state_dict()) end
            saved = saved or opt:state_dict()
        end)
    end)

    it("fails in the same words as the first step, and changes nothing", function()
        local function message(prepare, damage)
            local opt, params = optimizer()
            set_grads(params, 1)
            opt:step()
            if not prepare then opt.memory = nil end
            set_grads(params, 2)
            damage(opt, params)
            local ok, text = pcall(opt.step, opt)
            assert.is_false(ok)
            assert.equal(1, opt.state[params[2]].step)
            return text
        end
        for _, damage in ipairs {
            function(opt) opt.groups[1].lr = "fast" end,
            function(opt) opt.groups[1].eps = "tiny" end,
            function(opt) opt.groups[2].betas = nil end,
            function(_, params) params[1]:release() end,
            function(opt, params) opt.state[params[2]].exp_avg:release() end,
            function(opt, params) opt.state[params[2]].exp_avg_sq = te.zeros({ 7 }) end,
        } do
            assert.equal((message(false, damage):gsub("^.-:%d+: ", "")), (message(true, damage):gsub("^.-:%d+: ", "")))
        end
    end)

    it("refuses what is no prepared step", function()
        assert.error_matches(function() te._core.adamw_again(io.stdout, {}, {}) end,
            "expected what adamw_prepare returns")
        assert.error_matches(function() te._core.adamw_again(te.ones({ 1 }), {}, {}) end,
            "expected what adamw_prepare returns")
        assert.error_matches(function() te._core.adamw_prepare({ { params = { te.ones({ 1 }) } } }, {}) end,
            "exp_avg: 0 tensors for 1 parameters")
        assert.error_matches(function() te._core.adamw_prepare({ { params = { 1 } } }, {}) end, "expected a tensor")
    end)
end)
