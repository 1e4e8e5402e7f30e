--- Hooks: functions that see what modules take and give, and gradients on their way (te.Module, te.Tensor).
--
-- A module with hooks is called by itself wherever it stands, so what is fused around it ends there, and nothing that
-- it takes or gives is released early. Hooks are no part of a module's state and of its clones. A plan (explain) is
-- made without calling them.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local tree = require "te.module_tree"
local core = te._core

local hooks = { silent = false }

--- What register_hook and its kin return.
---@class te.Hook
local Hook = { __name = "Hook" }
Hook.__index = Hook

--- Takes the hook off. It may be called again.
function Hook:remove(...)
    options.method("Hook:remove", self, Hook)
    options.last("Hook:remove", 0, ...)
    if self.fn and self.module then self:leave() end
    self.fn = nil
end

function Hook:__tostring() return self.fn and "Hook" or "Hook(removed)" end

hooks.Hook = Hook

-- Modules -----------------------------------------------------------------------------------------------------------

function Hook:leave()
    local module, list = self.module, self.list
    for i, hook in ipairs(list) do
        if hook == self then
            table.remove(list, i)
            break
        end
    end
    local all = rawget(module, "_hooks")
    if #all.before + #all.after == 0 then
        rawset(module, "_hooks", nil)
        rawset(module, "pure", all.pure)
    end
    tree.replaced = tree.replaced + 1
end

--- Adds a hook to a module: which is "before" or "after".
---@return te.Hook
function hooks.add(who, module, which, fn)
    options.argument(who, "fn", fn, { "callable" })
    local all = rawget(module, "_hooks")
    if not all then
        all = { before = {}, after = {}, pure = rawget(module, "pure") }
        rawset(module, "_hooks", all)
        rawset(module, "pure", false)
    end
    tree.replaced = tree.replaced + 1
    local hook = setmetatable({ fn = fn, module = module, list = all[which] }, Hook)
    table.insert(all[which], hook)
    return hook
end

-- A copy, so that hooks may be added and removed while others run.
local function copy(list) return { unpack(list) } end

local function pack(...) return { n = select("#", ...), ... } end

local function run_after(module, args, results)
    for _, hook in ipairs(copy(rawget(module, "_hooks") and module._hooks.after or {})) do
        if hook.fn then
            local new = pack(hook.fn(module, args, unpack(results, 1, results.n)))
            if new[1] ~= nil then results = new end
        end
    end
    return unpack(results, 1, results.n)
end

--- Runs call(module, ...) between the hooks of the module.
function hooks.around(module, call, ...)
    if hooks.silent then return call(module, ...) end
    local args = pack(...)
    for _, hook in ipairs(copy(module._hooks.before)) do
        if hook.fn then
            local new = pack(hook.fn(module, args))
            if new[1] ~= nil then args = new end
        end
    end
    return run_after(module, args, pack(call(module, unpack(args, 1, args.n))))
end

local function product(module, x) return te.linear(x, module.weight, module.bias) end

--- What a layer makes of x outside of recipes: for modules that read the weight of one in them instead of calling it.
---@param layer table  a te.Linear
function hooks.product(layer, x)
    if rawget(layer, "_hooks") then return hooks.around(layer, product, x) end
    return product(layer, x)
end

-- Gradients ---------------------------------------------------------------------------------------------------------

--- Calls fn with the gradient of x in every backward pass that reaches it, before anything else reads the gradient.
--- Where fn returns a tensor, that takes its place.
---@param x te.Tensor
---@param fn fun(grad: te.Tensor): te.Tensor|nil
---@return te.Hook
function hooks.on_gradient(x, fn, ...)
    options.last("te.register_hook", 2, ...)
    if not te.is_tensor(x) then fail("te.register_hook: x: expected a tensor, got %s", core.describe(x)) end
    options.argument("te.register_hook", "fn", fn, { "callable" })
    local hook = setmetatable({ fn = fn }, Hook)
    core.hook_gradient(x, function(grad)
        if not hook.fn then return false end
        local given = hook.fn(grad)
        if given ~= nil and not te.is_tensor(given) then
            fail("te.register_hook: fn returned %s; a tensor or nil is needed", core.describe(given))
        end
        return given
    end)
    return hook
end

return hooks
