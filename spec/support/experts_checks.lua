-- Run by every process of a group: te.MoE whose experts are split between them against the same one in one process.
-- Prints "ok" and how many checks were made; an error ends all processes.

local te = require "te"
local alike = require "spec.support.alike"

local world, check, near, fails = alike.world, alike.check, alike.near, alike.fails
local rank, size = world.rank, world.size

local HIDDEN, INNER, EXPERTS = 12, 8, 12

local function copy(opts, more)
    local all = {}
    for _, t in ipairs { opts or {}, more or {} } do
        for key, value in pairs(t) do all[key] = value end
    end
    return all
end

-- The same mixture twice, with values that show in gradients; experts split in `group`.
local function pair(opts, group)
    local both = {}
    for i, split in ipairs { false, group } do
        te.manual_seed(11)
        both[i] = te.MoE(HIDDEN, INNER, EXPERTS,
            copy(opts, { group = split or nil, init_method = te.initializers.normal(0, 0.4) }))
        both.after = both.after or te.rng_state()
        check(both.after == te.rng_state(), "the random numbers go on alike")
    end
    local whole, split = both[1], both[2]
    local here = EXPERTS / group.size
    for _, layer in ipairs { 1, 3 } do
        check(#split.experts[layer].weight == here, "%d experts here", #split.experts[layer].weight)
        for e = 1, here do
            local all = group.rank * here + e
            near("weight", split.experts[layer].weight[e], whole.experts[layer].weight[all], 0)
            if opts.bias then
                te.no_grad(function()
                    te.manual_seed(100 * layer + all)
                    local bias = te.randn(split.experts[layer].bias[e].shape)
                    split.experts[layer].bias[e]:copy_(bias)
                end)
            end
        end
        for e = 1, opts.bias and EXPERTS or 0 do
            te.no_grad(function()
                te.manual_seed(100 * layer + e)
                whole.experts[layer].bias[e]:copy_(te.randn(whole.experts[layer].bias[e].shape))
            end)
        end
    end
    if opts.expert_bias then
        te.manual_seed(12)
        local bias = te.randn { EXPERTS }
        whole.expert_bias:copy_(bias)
        split.expert_bias:copy_(bias)
    end
    return whole, split
end

-- Rows of process r, and where they begin among all: as many as its number in `counts` says.
local function rows_of(x, counts, r)
    local at = 1
    for i = 1, r do at = at + counts[i] end
    return x:narrow(1, at, counts[r + 1])
end

local function name_of_whole(name, group)
    return (name:gsub("^(experts%.%d+%.%a+%.)(%d+)$", function(head, e)
        return head .. (group.rank * EXPERTS / group.size + tonumber(e))
    end))
end

local function compare_all(what, whole, split, group, tolerance, value)
    local wanted = {}
    for name, p in whole:named_parameters() do wanted[name] = p end
    for name, p in split:named_parameters() do
        local want, is = value(wanted[name_of_whole(name, group)]), value(p)
        if want or is then
            check(is or te.norm(want):item() == 0, "%s: %s: nothing here", what, name)
            if is then near(what .. ": " .. name, is, want or te.zeros(is.shape, { dtype = is.dtype }), tolerance) end
        end
    end
end

local function grad(p) return p.grad end

-- Forward, gradients and steps; the loss of one process with all rows is the average of the processes'.
local function compare(what, opts, counts, more)
    more = more or {}
    local group = more.group or world
    local whole, split = pair(opts, group)
    local dtype, tolerance = more.dtype or "float64", more.tolerance or 1e-12
    whole:to(dtype)
    split:to(dtype)
    local optimizers = {}
    for i, m in ipairs { whole, split } do optimizers[i] = te.optim.AdamW(m:parameters(), { lr = 0.01 }) end
    local total = 0
    for _, n in ipairs(counts) do total = total + n end
    for step = 1, 3 do
        te.manual_seed(20 + step)
        local all = te.randn({ total, HIDDEN }, { dtype = dtype })
        if more.tilt then all:narrow(2, 1, 1):fill_(more.tilt) end
        local weights = te.randn({ total, HIDDEN }, { dtype = dtype })
        local mine = rows_of(all, counts, rank):clone()
        all.requires_grad, mine.requires_grad = true, true
        local y, part
        te.autocast({ enabled = more.compute ~= nil, dtype = more.compute }, function()
            y, part = whole(all), split(mine)
        end)
        check(part.dtype == y.dtype, "%s: dtype %s, not %s", what, part.dtype, y.dtype)
        near(what .. ": y", part, rows_of(y, counts, rank), tolerance)
        local loss, part_loss = te.sum(y * weights), te.sum(part * rows_of(weights, counts, rank)) * size
        if opts.aux_loss_coeff then
            near(what .. ": aux loss", world:all_reduce(split.aux_loss:detach(), "average"), whole.aux_loss, tolerance)
            loss, part_loss = loss + whole.aux_loss, part_loss + split.aux_loss
        end
        loss:backward()
        part_loss:backward()
        near(what .. ": dx", mine.grad / size, rows_of(all.grad, counts, rank), tolerance)
        te.distributed.average_gradients(step == 2 and split:parameters() or split)
        compare_all(what .. ": gradient", whole, split, group, tolerance, grad)
        for i, m in ipairs { whole, split } do
            optimizers[i]:step()
            m:zero_grad()
        end
    end
    compare_all(what .. ": after steps", whole, split, group, math.max(tolerance * 10, 1e-9), function(p) return p end)
    whole:eval()
    split:eval()
    te.no_grad(function()
        local x = te.randn({ total, HIDDEN }, { dtype = dtype })
        local y = split(rows_of(x, counts, rank))
        near(what .. ": evaluation", y, rows_of(whole(x), counts, rank), tolerance * 100)
        check(split.aux_loss == nil, "no loss in evaluation")
    end)
end

local even, ragged, one = {}, {}, {}
for r = 1, size do even[r], ragged[r], one[r] = 5, 3 * r - 2, r == size and 7 or 0 end

compare("even", {}, even)
compare("ragged", { topk = 3, bias = true, router_bias = true, aux_loss_coeff = 0.3 }, ragged)
compare("rows in one process", { topk = 2, aux_loss_coeff = 0.3 }, one)
compare("one choice", { topk = 1, score_function = "sigmoid", expert_bias = true, scaling_factor = 1.5 }, ragged)
compare("all choices", { topk = EXPERTS }, even)
compare("groups of experts", { topk = 4, num_groups = 3, group_topk = 2, use_pre_softmax = true,
    aux_loss_coeff = 0.1 }, even)
compare("a shared expert", { shared = 9, shared_gate = true, bias = true, activation = "GEGLU" }, ragged)
compare("few experts chosen", { topk = 1, aux_loss_coeff = 1 }, even, { tilt = 50, tolerance = 1e-9 })
compare("float32", { aux_loss_coeff = 0.1, activation = "ClampedSwiGLU" }, ragged,
    { dtype = "float32", tolerance = 1e-4 })

-- Rounded in between: one forward and its gradients alone, since an expert that is chosen otherwise is another result.
do
    local whole, split = pair({}, world)
    te.manual_seed(31)
    local all, counts = te.randn { 6 * size, HIDDEN }, {}
    for r = 1, size do counts[r] = 6 end
    local y, part
    te.autocast({ dtype = "bfloat16" }, function() y, part = whole(all), split(rows_of(all, counts, rank)) end)
    check(part.dtype == "bfloat16", "under te.autocast")
    near("bfloat16", part, rows_of(y, counts, rank), 2 ^ -7)
    te.sum(y):backward()
    te.sum(part * size):backward()
    te.distributed.average_gradients(split)
    compare_all("bfloat16", whole, split, world, 0.03, grad)
    local recipe = te.recipe.MXFP8BlockScaling()
    local low = te.autocast({ recipe = recipe }, function() return split(rows_of(all, counts, rank)) end)
    check(te.all(te.isfinite(low)):item(), "under a recipe")
end

do -- no tokens at all, and in a checkpoint
    local _, split = pair({ aux_loss_coeff = 0.1 }, world)
    check(split(te.zeros { 0, HIDDEN }).shape[1] == 0 and split.aux_loss:item() == 0, "no tokens")
    local x = te.randn({ 2, 3, HIDDEN }, { requires_grad = true })
    te.sum(split(x)):backward()
    local want = x.grad:clone()
    x.grad = nil
    te.sum(te.checkpoint(function(v) return split(v) end, x)):backward()
    near("te.checkpoint", x.grad, want, 0)
end

do -- experts of half the processes, twice
    if size == 4 then
        local half = world:split(math.floor(rank / 2))
        compare("two halves", { topk = 3 }, ragged, { group = half })
    end
end

do -- what one process has of its own is not overwritten
    local opts = { topk = 2 }
    local groups = { world, size == 4 and world:split(math.floor(rank / 2)) or nil }
    for _, group in ipairs(groups) do
        local _, split = pair(opts, group)
        local function fill()
            te.no_grad(function()
                for i, p in ipairs(split:parameters()) do p:fill_(100 * rank + i) end
            end)
        end
        fill()
        local number = {}
        for i, p in ipairs(split:parameters()) do number[p] = i end
        local root = size - 1
        te.distributed.broadcast_parameters(te.Sequential(te.Residual(split)), { root = root })
        local like_root = group.size == size and rank or root - (group.size - 1 - group.rank)
        for name, p in split:named_parameters() do
            local from = name:find("^experts") and like_root or root
            near("broadcast " .. name, p, te.full(p.shape, 100 * from + number[p]), 0)
        end
        fill()
        te.distributed.broadcast_parameters(split:parameters(), { root = 0 })
        near("a list", split.router.weight, te.full({ EXPERTS, HIDDEN }, number[split.router.weight]), 0)
        local first = split.experts[1].weight[1]
        local from = group.size == size and rank or group.rank
        near("a list's experts", first, te.full(first.shape, 100 * from + number[first]), 0)
    end
end

do -- nor what its parts and its scales are, where weights are stored quantized
    local recipe, split = te.recipe.DelayedScaling { reduce_amax = false }, nil
    te.manual_seed(41)
    te.quantized_model_init({ recipe = recipe }, function()
        split = te.MoE(32, 32, EXPERTS, { group = world, init_method = te.initializers.normal(0, 1) })
    end)
    te.autocast({ recipe = recipe }, function() split(te.randn({ 64, 32 }) * (rank + 1)) end)
    local before, seen = {}, 0
    for name, t in pairs(split:state_dict()) do before[name] = t:clone() end
    te.distributed.broadcast_parameters(split)
    for name, t in pairs(split:state_dict()) do
        if name:find "^experts" then
            seen = seen + (name:find "rowwise_data" and 1 or 0) + (name:find "input_amax_history" and 1 or 0)
            near("quantized " .. name, t, before[name], 0)
        end
    end
    check(seen >= 4 * EXPERTS / size, "parts and scales were seen: %d", seen)
end

if size > 1 then
    fails(("te.MoE: num_experts = %d cannot be split between %d processes"):format(size + 1, size), te.MoE, 4, 4,
        size + 1, { group = world })
    local _, split = pair({}, world)
    check(tostring(split):find(tostring(world), 1, true), "%s", tostring(split))
end
fails("te.MoE: option group: expected a group of te.distributed, got 3", te.MoE, 4, 4, 4, { group = 3 })
local alone = te.MoE(4, 4, 4, { group = world:split(rank) })
check(alone.group == nil and #alone.experts[1].weight == 4, "a group of one has all experts")

alike.done()
