--- Experts of te.MoE that are split between the processes of a group: each has some, one after the other in the order
--- of the ranks, and rows go to the owners of their experts and back.
--
--     at home          rows by expert                       counts[r][e]: rows of process r for expert e
--     to_experts       my experts' rows of all processes, by expert and within it by process
--     from_experts     what the experts made of my rows, by expert
--
-- Each is the other's gradient. Rows travel in size - 1 rounds; in round k each process hears from the one k before it,
-- with as many rows as the longest message of the round has, since processes call alike.

local te = require "te"
local core = te._core

local experts = {}

--- How many rows of which process go to which expert: sizes {experts} of this process, read by the host.
function experts.plan(group, sizes)
    local own = sizes:to("cpu"):to("int64"):view { 1, -1 }
    local counts = group:all_gather(own):totable()
    local each, rows = #counts[1] / group.size, {}
    for r = 1, group.size do
        rows[r] = {}
        for owner = 1, group.size do
            local n = 0
            for e = (owner - 1) * each + 1, owner * each do n = n + counts[r][e] end
            rows[r][owner] = n
        end
    end
    return { group = group, counts = counts, each = each, rows = rows }
end

--- The rows of all processes for each expert.
function experts.totals(plan)
    local totals = {}
    for e = 1, #plan.counts[1] do
        totals[e] = 0
        for r = 1, plan.group.size do totals[e] = totals[e] + plan.counts[r][e] end
    end
    return totals
end

-- Of numbers for all experts those of the ones here. Lists of experts may be longer than Lua's stack.
local function here(plan, numbers)
    local own, first = {}, plan.group.rank * plan.each
    for e = 1, plan.each do own[e] = numbers[first + e] end
    return own
end

-- Of those here, as a tensor.
function experts.sizes_here(plan)
    return te.tensor(here(plan, experts.totals(plan)), { dtype = "int64", device = "cpu" })
end

local function join(parts) return #parts == 1 and parts[1] or te.cat(parts, 1) end

-- x with zeros below, so that it has n rows.
local function pad(x, n)
    local shape = x.shape
    if shape[1] == n then return x end
    shape[1] = n - shape[1]
    return te.cat({ x, te.zeros(shape, { dtype = x.dtype, device = x.device }) }, 1)
end

-- pieces[r + 1] goes to rank r; what came, by rank. sent(from, to), counted from 1: how many rows that is.
local function exchange(group, pieces, sent)
    local size, rank, came = group.size, group.rank, {}
    came[rank + 1] = pieces[rank + 1]
    for step = 1, size - 1 do
        local to, from, most = (rank + step) % size, (rank - step) % size, 0
        for r = 0, size - 1 do most = math.max(most, sent(r + 1, (r + step) % size + 1)) end
        local got = pieces[to + 1]
        if most > 0 then got = group:exchange(pad(got, most), to, from) end
        came[from + 1] = got:narrow(1, 1, sent(from + 1, rank + 1))
    end
    return came
end

-- x in pieces of that many rows.
local function cut(x, sizes)
    local pieces, at = {}, 1
    for i, n in ipairs(sizes) do pieces[i], at = x:narrow(1, at, n), at + n end
    return pieces
end

local function to_experts(plan, x)
    local me, rows = plan.group.rank + 1, plan.rows
    local came = exchange(plan.group, cut(x, rows[me]), function(from, to) return rows[from][to] end)
    local parts, of = {}, {}
    for r, piece in ipairs(came) do of[r] = cut(piece, here(plan, plan.counts[r])) end
    for e = 1, plan.each do
        for r = 1, plan.group.size do parts[#parts + 1] = of[r][e] end
    end
    return join(parts)
end

local function from_experts(plan, x)
    local me, rows, size = plan.group.rank + 1, plan.rows, plan.group.size
    local sizes, pieces = {}, {}
    for e = 1, plan.each do
        for r = 1, size do sizes[#sizes + 1] = plan.counts[r][(me - 1) * plan.each + e] end
    end
    local parts = cut(x, sizes)
    for r = 1, size do
        local own = {}
        for e = 1, plan.each do own[e] = parts[(e - 1) * size + r] end
        pieces[r] = join(own)
    end
    return join(exchange(plan.group, pieces, function(from, to) return rows[to][from] end))
end

-- forward(plan, x), whose gradient is backward(plan, dy).
local function differentiable(forward, backward)
    return function(plan, x)
        return core.custom(function(_, value)
            local y = forward(plan, value)
            return rawequal(y, value) and value:view(value.shape) or y
        end, function(_, dy) return backward(plan, dy) end, x)
    end
end

experts.to_experts = differentiable(to_experts, from_experts)
experts.from_experts = differentiable(from_experts, to_experts)

--- An initializer for `count` tensors in a row, behind `before` and in front of `after` others that it would fill: they
--- get what they would get among all, and no more than one other is there at a time.
function experts.initializer(init, before, count, after)
    local made = 0
    local function skip(t, n)
        for _ = 1, n do
            local other = te.empty(t.shape, { dtype = t.dtype, device = t.device })
            init(other)
            other:release()
        end
    end
    return function(t)
        made = made + 1
        if made == 1 then skip(t, before) end
        local replaced = init(t)
        if made == count then skip(t, after) end
        return replaced
    end
end

return experts
