-- What the processes of a group compare with: checks that are counted and name their rank.

local te = require "te"

local alike = { checks = 0, world = te.distributed.world() }

function alike.check(holds, format, ...)
    alike.checks = alike.checks + 1
    if not holds then error(("rank %d: " .. format):format(alike.world.rank, ...), 2) end
end

local function numbers(t) return t:detach():to("float64"):reshape({ -1 }):totable() end

--- Shapes are equal, and so is each number up to `tolerance` times the largest finite one, or times `least` where all
--- are smaller. Infinities and NaN are where they are in the other.
function alike.near(name, a, b, tolerance, least)
    local shapes = { table.concat(a.shape, ","), table.concat(b.shape, ",") }
    alike.check(shapes[1] == shapes[2], "%s: shapes {%s} and {%s}", name, shapes[1], shapes[2])
    local is, want, largest = numbers(a), numbers(b), least or 0
    for _, v in ipairs(want) do
        if math.abs(v) < math.huge then largest = math.max(largest, math.abs(v)) end
    end
    local wrong
    for i, v in ipairs(want) do
        local w = is[i]
        local holds = v == w or v ~= v and w ~= w or math.abs(v - w) <= tolerance * largest
        wrong = wrong or not holds and ("number %d is %.17g, not %.17g"):format(i, w, v)
    end
    alike.check(not wrong, "%s: %s", name, wrong)
end

--- All numbers are equal, and so are the shapes.
function alike.same(name, a, b)
    local shapes = { table.concat(a.shape, ","), table.concat(b.shape, ",") }
    alike.check(shapes[1] == shapes[2], "%s: shapes {%s} and {%s}", name, shapes[1], shapes[2])
    local sum = te.no_grad(function() return te.sum(te.abs(a:to("float64") - b:to("float64"))) end):item()
    alike.check(sum == 0, "%s differs by %g", name, sum)
end

--- The function raises, with the text in its message.
function alike.fails(text, ...)
    local done, problem = pcall(...)
    alike.check(not done and tostring(problem):find(text, 1, true), "%q, not %q", tostring(problem), text)
end

function alike.done()
    alike.world:barrier()
    io.write(("ok %d\n"):format(alike.checks))
end

return alike
