--- Whether lengths of packed sequences are in force: for what a container runs that has been given them, unless it says
--- with takes_seq_lens = false that they do not concern it. Attention that gets none there would see across sequences.

local fail = require "te.fail"

local packed = { container = nil } -- the innermost container that runs with lengths

--- Sets the container, nil: none; returns the one before.
function packed.swap(container)
    local before = packed.container
    packed.container = container
    return before
end

--- Raises where `attention`, which was given no lengths, runs while there are some.
function packed.check(attention)
    local container = packed.container
    if not container then return end
    fail("te.%s: seq_lens did not come here, though %s runs packed sequences: what calls it takes them as second "
        .. "argument and hands them on, or says with takes_seq_lens = false in its class that they do not concern it",
        attention.__name, container.__name)
end

require("te.settle").when_stopped(function() packed.container = nil end)

return packed
