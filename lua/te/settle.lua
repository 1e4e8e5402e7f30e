--- What a call of the host leaves behind that was stopped: scopes that did not end, since Lua runs no more where an
--- interrupt, a limit or memory that is out stops a script. The host has all of it put back when its call has ended.

local pairs, pcall, running = pairs, pcall, coroutine.running -- what scripts put in their places is not called

local settle = {
    unfinished = {}, -- by what it is about: what undoes it, where a function was to do that itself at its end
}

local resets, by_coroutine = {}, setmetatable({}, { __mode = "k" })

--- Where a function that may be left in the middle puts what undoes it: of a coroutine that nobody resumes any more
--- nothing is kept, and nothing is undone.
function settle.of_coroutine()
    local thread = running()
    if not thread then return settle.unfinished end
    by_coroutine[thread] = by_coroutine[thread] or {}
    return by_coroutine[thread]
end

--- Has fn() called then: it puts a setting back to where no scope is open.
function settle.when_stopped(fn) resets[#resets + 1] = fn end

local function undo_all(unfinished)
    for key, undo in pairs(unfinished) do
        pcall(undo)
        unfinished[key] = nil -- now that it was not stopped itself
    end
end

--- What the host has done.
function settle.undo()
    for i = 1, #resets do resets[i]() end
    undo_all(settle.unfinished)
    for _, unfinished in pairs(by_coroutine) do undo_all(unfinished) end
end

require("te")._core.settle_with(settle.undo)

return settle
