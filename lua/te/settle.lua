--- What a call of the host leaves behind that was stopped: scopes that did not end, since Lua runs no more where an
--- interrupt, a limit or memory that is out stops a script. The host has all of it put back when its call has ended.

local pairs, pcall = pairs, pcall -- what scripts put in their places is not called

local settle = {
    unfinished = {}, -- by what it is about: what undoes it, where a function was to do that itself at its end
}

local resets = {}

--- Has fn() called then: it puts a setting back to where no scope is open.
function settle.when_stopped(fn) resets[#resets + 1] = fn end

require("te")._core.settle_with(function()
    for i = 1, #resets do resets[i]() end
    for key, undo in pairs(settle.unfinished) do
        pcall(undo)
        settle.unfinished[key] = nil -- now that it was not stopped itself
    end
end)

return settle
