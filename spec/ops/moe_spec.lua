local te = require "te"

local function list(t) return t:to("float64"):totable() end

local function int32(values) return te.tensor(values, { dtype = "int32" }) end

-- A random mask {tokens, experts}; some tokens have no expert.
local function random_mask(tokens, experts) return te.lt(te.rand { tokens, experts }, 0.4) end

-- Rows of the experts, one after the other: { t, column } from 1 each; by a mask or by ids.
local function places(routing)
    local rows, table_of, mask = {}, list(routing), routing.dtype == "bool"
    local experts = mask and routing:size(2) or 0
    if not mask then
        for _, slots in ipairs(table_of) do
            for _, id in ipairs(slots) do experts = math.max(experts, id + 1) end
        end
    end
    for e = 1, experts do
        for t, columns in ipairs(table_of) do
            for c, value in ipairs(columns) do
                local here = mask and c == e and value ~= 0 or not mask and value == e - 1
                if here then rows[#rows + 1] = { t = t, column = c, expert = e } end
            end
        end
    end
    return rows
end

-- What te.moe_permute gives: `count` rows, times 0 or 1 by probabilities.
local function permuted(x, routing, count, probs)
    local rows, from = {}, places(routing)
    for i = 1, count do
        rows[i] = {}
        for c = 1, #x[1] do
            local place = from[i]
            local dead = not place or probs and probs[place.t][place.column] == 0
            rows[i][c] = dead and 0 or x[place.t][c]
        end
    end
    return rows
end

local function near(expected, got, tolerance)
    got = list(got)
    assert.equal(#expected, #got)
    for i, row in ipairs(expected) do
        if type(row) ~= "table" then row, got[i] = { row }, { got[i] } end
        for c, value in ipairs(row) do assert.near(value, got[i][c], tolerance * math.max(1, math.abs(value))) end
    end
end

describe("mixtures of experts", function()
    before_each(function() te.manual_seed(7) end)

    for _, dtype in ipairs { "float32", "bfloat16", "float16", "float64" } do
        it("bring rows to experts and back, " .. dtype, function()
            local tolerance = dtype == "float64" and 1e-12 or dtype == "float32" and 1e-6 or 0.01
            for _, case in ipairs { { 33, 9, 70 }, { 1, 1, 1 }, { 40, 3, 64 }, { 5, 20, 17 } } do
                local tokens, experts, width = unpack(case)
                local x = te.randn({ tokens, width }, { dtype = dtype })
                local mask = random_mask(tokens, experts)
                local ids = te.randint(0, experts - 1, { tokens, 3 }, { dtype = experts > 5 and "int64" or "int32" })
                local all = #places(mask)
                for _, count in ipairs { -1, all, all + 3, math.max(all - 4, 1) } do
                    local y = te.moe_permute(x, mask, count)
                    if count ~= 0 and (count > 0 or all > 0) then
                        near(permuted(list(x), mask, count < 0 and all or count), y, 0)
                    end
                end
                local y, map = te.moe_permute(x, ids)
                near(permuted(list(x), ids, 3 * tokens), y, 0)
                assert.same({ 3 * tokens }, map.shape)
                local probs = te.rand({ tokens, 3 }, { dtype = dtype })
                local merged, from = {}, list(x)
                for t, row in ipairs(list(probs)) do
                    merged[t] = {}
                    for c = 1, width do merged[t][c] = (row[1] + row[2] + row[3]) * from[t][c] end
                end
                near(merged, te.moe_unpermute(y, map, probs), tolerance)
                near(merged, te.moe_unpermute(y * 1, map, probs, nil, { tokens, width }), tolerance)
                local plain = te.moe_unpermute(y, map, nil, nil, { tokens, width })
                near(list(3 * x), plain, tolerance)
            end
        end)
    end

    it("weigh, gate and pad", function()
        local tokens, experts, width, align = 29, 6, 24, 8
        local x, mask = te.randn { tokens, width }, random_mask(tokens, experts)
        local probs = te.rand { tokens, experts } * te.ge(te.rand { tokens, experts }, 0.2):to("float32")
        local from, of = places(mask), list(probs)
        local y, moved, map = te.moe_permute_with_probs(x, probs, mask, #from)
        near(permuted(list(x), mask, #from, of), y, 0)
        for i, place in ipairs(from) do assert.equal(of[place.t][place.column], moved[i]:item()) end
        local counts = te.sum(mask, 1)
        local padded, probabilities, same, offsets, sizes =
            te.moe_permute_and_pad_with_probs(x, probs, mask, counts, align)
        assert.same(list(map), list(same))
        local rows, begin = list(padded), 1
        for e, count in ipairs(list(counts)) do
            assert.equal(math.ceil(count / align) * align, sizes[e]:item())
            local own = {}
            for _, place in ipairs(from) do own[#own + 1] = place.expert == e and place or nil end
            for i = 1, sizes[e]:item() do
                local live = own[i] and of[own[i].t][e] ~= 0
                assert.equal(live and of[own[i].t][e] or 0, probabilities[begin + i - 1]:item())
                for c = 1, width do
                    assert.equal(live and x[own[i].t][c]:item() or 0, rows[begin + i - 1][c])
                end
            end
            begin = begin + sizes[e]:item()
        end
        assert.equal(begin - 1, padded:size(1))
        assert.same(list(te.moe_unpermute(y, map, probs)), list(te.moe_unpermute(padded, map, probs, offsets)))
        -- gradients through the whole way, against those of one product
        local weights = te.where(mask, probs, 0):detach()
        x, probs = x:detach(), probs:detach()
        x.requires_grad, probs.requires_grad = true, true
        local rows_of, _, way, shifts = te.moe_permute_and_pad_with_probs(x, probs, mask, counts, align)
        local factor = te.randn { tokens, width }
        te.sum(te.moe_unpermute(rows_of, way, probs, shifts) * factor):backward()
        near(list(te.sum(weights, 2, true) * factor), x.grad, 1e-5)
        local dots = list(te.where(mask, te.sum(x:detach() * factor, 2, true), 0))
        for t, row in ipairs(list(probs.grad)) do
            for e, value in ipairs(row) do
                local live = of[t][e] ~= 0 and dots[t][e] or 0
                assert.near(live, value, 1e-4)
            end
        end
    end)

    it("leave nothing behind that no gradient was taken of", function()
        local x, mask, probs = te.randn { 9, 4 }, random_mask(9, 3), te.rand { 9, 3 }
        x.requires_grad, probs.requires_grad = true, true
        local function run()
            local y, _, map, offsets = te.moe_permute_and_pad_with_probs(x, probs, mask, te.sum(mask, 1), 4)
            te.moe_unpermute(y, map, probs, offsets)
            te.moe_permute(x, mask)
            te.fused_topk_with_score_function(probs, 2)
            te.fused_compute_score_for_moe_aux_loss(probs, 2)
        end
        local function bytes()
            for _ = 1, 3 do collectgarbage() end
            return te.memory_stats().current
        end
        run()
        local before = bytes()
        for _ = 1, 20 do run() end
        assert.equal(before, bytes())
    end)

    it("give the same bits with any number of threads", function()
        local x, mask, probs = te.randn { 700, 96 }, random_mask(700, 12), te.rand { 700, 12 }
        local results, threads = {}, te.get_num_threads()
        for n = 1, 2 do
            te.set_num_threads(n)
            local input, weights = x:detach(), probs:detach()
            input.requires_grad, weights.requires_grad = true, true
            local y, p, map = te.moe_permute_with_probs(input, weights, mask)
            local back = te.moe_unpermute(y, map, weights)
            te.sum(back * x + te.sum(p)):backward()
            results[n] = { list(y), list(back), list(input.grad), list(weights.grad) }
        end
        te.set_num_threads(threads)
        assert.same(results[1], results[2])
    end)

    it("refuse what does not fit, and maps that were tampered with", function()
        local x, mask = te.randn { 4, 3 }, te.gt(te.ones { 4, 2 }, 0)
        local function refuses(message, f, ...)
            local args, n = { ... }, select("#", ...)
            assert.error_matches(function()
                f(unpack(args, 1, n))
                te.synchronize()
            end, message)
        end
        refuses("te.moe_permute: x must be {tokens, width}", te.moe_permute, x:view { 12 }, mask)
        refuses("te.moe_permute: routing_map must be {4, experts}, not {3,2}", te.moe_permute, x, mask:narrow(1, 1, 3))
        refuses("te.moe_permute: routing_map must be a mask", te.moe_permute, x, te.ones { 4, 2 })
        refuses("te.moe_permute: num_out_tokens = %-2", te.moe_permute, x, mask, -2)
        refuses("te.moe_permute: num_out_tokens = 0", te.moe_permute, x, mask, 0)
        refuses("te.moe_permute_with_probs: probs must be {4,2}", te.moe_permute_with_probs, x, te.ones { 4, 3 }, mask)
        refuses("tokens_per_expert%[2%] = 3, routing_map has 4", te.moe_permute_and_pad_with_probs, x, te.ones { 4, 2 },
            mask, int32 { 4, 3 }, 4)
        refuses("align = 0", te.moe_permute_and_pad_with_probs, x, te.ones { 4, 2 }, mask, int32 { 4, 4 }, 0)
        refuses("outside 0 to", te.moe_permute, x, int32 { { 0, 1 }, { 0, -1 }, { 0, 0 }, { 1, 1 } })
        local y, map = te.moe_permute(x, mask)
        refuses("te.moe_unpermute: row_id_map must be", te.moe_unpermute, y, map:to("int64"))
        refuses("te.moe_unpermute: row_id_map must be", te.moe_unpermute, y, map:narrow(2, 1, 4))
        refuses("te.moe_unpermute: merging_probs must be {4,2}", te.moe_unpermute, y, map, te.ones { 4, 4 })
        refuses("te.moe_unpermute: pad_offsets", te.moe_unpermute, y, map, nil, int32 { 0 })
        refuses("restore_shape must be {4,3}", te.moe_unpermute, y, map, nil, nil, { 3, 3 })
        local _, ids = te.moe_permute(x, int32 { { 0, 1 }, { 0, 1 }, { 0, 1 }, { 0, 1 } })
        refuses("row_id_map {8} does not fit 3 tokens", te.moe_unpermute, y, ids, nil, nil, { 3, 3 })
        refuses("outside 0 to 6", te.moe_unpermute, y:narrow(1, 1, 7), map)
        for place, value in ipairs { 8, -7, 2, -1, 3 } do -- row, row, expert, expert, count
            local wrong = map:clone()
            wrong[2]:narrow(1, place, 1):fill_(value)
            if place ~= 2 then
                refuses(place == 5 and te.get_default_device() == "cpu" and "token 2 has 3 of 2" or "outside 0 to",
                    te.moe_unpermute, y, wrong)
            else
                te.moe_unpermute(y, wrong) -- nowhere
            end
        end
        refuses("outside 0 to 7", te.moe_unpermute, y, map, nil, int32 { 0, 1 })
        assert.same({ 0, 3 }, (te.moe_permute(te.zeros { 0, 3 }, te.gt(te.zeros { 0, 2 }, 0))).shape)
        assert.same({ 4, 0 }, te.moe_unpermute(te.zeros { 8, 0 }, map).shape)
        assert.same({ 2, 3 }, (te.moe_permute(x, te.gt(te.zeros { 4, 2 }, 0), 2)).shape)
    end)
end)

-- Transformer Engine's fused router, one token at a time.
local function route(logits, k, o)
    local score, choice, n = {}, {}, #logits
    local function softmax(values, over)
        local most, sum, result = -math.huge, 0, {}
        for e = 1, n do most = over[e] and math.max(most, values[e]) or most end
        for e = 1, n do
            result[e] = over[e] and math.exp(values[e] - most) or 0
            sum = sum + result[e]
        end
        for e = 1, n do result[e] = result[e] / sum end
        return result
    end
    local all = {}
    for e = 1, n do all[e] = true end
    if o.score_function == "sigmoid" then
        for e = 1, n do score[e] = 1 / (1 + math.exp(-logits[e])) end
    elseif o.score_function == "sqrtsoftplus" then
        for e = 1, n do score[e] = math.sqrt(math.log(1 + math.exp(logits[e]))) end
    else
        score = o.use_pre_softmax and softmax(logits, all) or logits
    end
    for e = 1, n do choice[e] = score[e] + (o.bias and o.bias[e] or 0) end
    local function best(values, count)
        local order = {}
        for i = 1, #values do order[i] = i end
        table.sort(order, function(a, b) return values[a] > values[b] or values[a] == values[b] and a < b end)
        local chosen, sum = {}, 0
        for i = 1, count do
            chosen[order[i]] = true
            sum = sum + values[order[i]]
        end
        return chosen, sum
    end
    if o.num_groups then
        local size, sums = n / o.num_groups, {}
        for g = 1, o.num_groups do
            local part = {}
            for i = 1, size do part[i] = choice[(g - 1) * size + i] end
            local _, sum = best(part, k / o.group_topk)
            sums[g] = sum
        end
        local groups = best(sums, o.group_topk)
        for e = 1, n do choice[e] = groups[math.ceil(e / size)] and choice[e] or -math.huge end
    end
    local map, probs, sum = best(choice, k), {}, 0
    if not o.score_function and not o.use_pre_softmax then score = softmax(logits, map) end
    for e = 1, n do sum = sum + (map[e] and score[e] or 0) end
    for e = 1, n do
        local share = o.score_function and k > 1 and sum or 1
        probs[e] = map[e] and score[e] / share * (o.scaling_factor or 1) or 0
    end
    return probs, map
end

describe("no tokens", function()
    it("come back from experts as none, with and without probabilities", function()
        for _, kind in ipairs { "int64", "bool" } do
            local routing = te.zeros({ 0, 3 }, { dtype = kind })
            local x, probs = te.ones({ 0, 8 }, { requires_grad = true }), te.ones({ 0, 3 }, { requires_grad = true })
            local rows, map = te.moe_permute(x, routing)
            assert.same({ 0, 8 }, te.moe_unpermute(rows, map).shape)
            te.moe_unpermute(rows, map, probs):sum():backward()
            assert.same({ 0, 8 }, x.grad.shape)
            assert.same({ 0, 3 }, probs.grad.shape)
        end
    end)
end)

describe("the router of experts", function()
    before_each(function() te.manual_seed(11) end)

    local cases = {
        {}, { use_pre_softmax = true, scaling_factor = 2.5 }, { score_function = "sigmoid" },
        { score_function = "sqrtsoftplus", scaling_factor = 0.5 }, { score_function = "sigmoid", biased = true },
        { num_groups = 4, group_topk = 2 },
        { num_groups = 3, group_topk = 1, score_function = "sigmoid", biased = true },
        { num_groups = 4, group_topk = 4, use_pre_softmax = true }, { score_function = "sqrtsoftplus", biased = true },
    }
    for i, case in ipairs(cases) do
        it("chooses as the router of Transformer Engine does, case " .. i, function()
            for _, k in ipairs { 4, case.num_groups and 4 or 1 } do
                local logits, bias = te.randn { 50, 12 } * 3, case.biased and te.randn { 12 } or nil
                local probs, map = te.fused_topk_with_score_function(logits, k, bias, {
                    use_pre_softmax = case.use_pre_softmax, num_groups = case.num_groups, group_topk = case.group_topk,
                    scaling_factor = case.scaling_factor, score_function = case.score_function })
                assert.equal("bool", map.dtype)
                local got, chosen = list(probs), map:totable()
                for t, row in ipairs(list(logits)) do
                    local expected, mask = route(row, k, setmetatable({ bias = bias and list(bias) },
                        { __index = case }))
                    for e = 1, 12 do
                        assert.equal(mask[e] or false, chosen[t][e])
                        assert.near(expected[e], got[t][e], 2e-6)
                    end
                end
            end
        end)
        it("has the gradient of its numbers, case " .. i, function()
            local bias = case.biased and te.randn { 12 } or nil
            for _, k in ipairs { 4, case.num_groups and 4 or 1 } do
                assert.is_true(te.gradcheck(function(logits)
                    return (te.fused_topk_with_score_function(logits, k, bias, { num_groups = case.num_groups,
                        use_pre_softmax = case.use_pre_softmax, group_topk = case.group_topk,
                        scaling_factor = case.scaling_factor, score_function = case.score_function }))
                end, { te.randn({ 5, 12 }, { dtype = "float64" }) }))
            end
        end)
    end

    it("breaks ties by the lower index, takes NaN first, keeps infinities apart", function()
        local inf, nan = math.huge, 0 / 0
        local logits = te.tensor { { 1, 1, 1, 1 }, { 0, -0.0, 0, nan }, { -inf, -inf, 2, -inf }, { -3, inf, -1, -2 } }
        local _, map = te.fused_topk_with_score_function(logits, 2)
        assert.same({ { true, true, false, false }, { true, false, false, true }, { true, false, true, false },
            { false, true, true, false } }, map:totable())
    end)

    it("gives scores of all for the balancing loss", function()
        for _, fn in ipairs { "softmax", "sigmoid", "sqrtsoftplus" } do
            local logits = te.randn({ 20, 7 }, { dtype = "bfloat16" })
            local map, scores = te.fused_compute_score_for_moe_aux_loss(logits, 2, { score_function = fn })
            assert.equal("float32", scores.dtype)
            near((function()
                local ones = {}
                for i = 1, 20 do ones[i] = 1 end
                return ones
            end)(), te.sum(scores, 2), 1e-5)
            for t, row in ipairs(map:totable()) do
                local _, expected = route(list(logits)[t], 2, {})
                for e = 1, 7 do assert.equal(expected[e] or false, row[e]) end
            end
            local counts = te.sum(map, 1)
            local loss, sum = te.fused_moe_aux_loss(scores, counts, 20, 7, 2, 0.3), 0
            for e = 1, 7 do sum = sum + counts[e]:item() * te.sum(scores:select(2, e)):item() end
            assert.near(0.3 * 7 / (2 * 20 ^ 2) * sum, loss:item(), 1e-6)
        end
    end)

    it("balances many tokens in float16", function()
        local probs = te.full({ 4096, 8 }, 1 / 8, { dtype = "float16", requires_grad = true })
        local loss = te.fused_moe_aux_loss(probs, te.full({ 8 }, 1024, { dtype = "int64" }), 4096, 8, 2, 0.01)
        assert.equal("float16", loss.dtype)
        assert.near(0.01, loss:item(), 1e-5)
        loss:backward()
        assert.near(8 * 0.01 / (2 * 4096 ^ 2) * 1024, probs.grad[1][1]:item(), 1e-7)
    end)

    it("refuses what makes no sense", function()
        local logits = te.randn { 3, 6 }
        local function refuses(message, ...)
            local args, n = { ... }, select("#", ...)
            assert.error_matches(function() te.fused_topk_with_score_function(unpack(args, 1, n)) end, message)
        end
        refuses("logits must be {tokens, experts}", te.randn { 6 }, 2)
        refuses("topk = 7 of 6 experts", logits, 7)
        refuses("num_groups = 4 of 6 experts", logits, 2, nil, { num_groups = 4 })
        refuses("group_topk = 2 for topk = 3", logits, 3, nil, { num_groups = 3, group_topk = 2 })
        refuses("expert_bias must be {6}", logits, 2, te.zeros { 6 })
        refuses("use_pre_softmax is for", logits, 2, nil, { use_pre_softmax = true, score_function = "sigmoid" })
        refuses("score_function", logits, 2, nil, { score_function = "tanh" })
        local loss = te.fused_moe_aux_loss
        assert.error_matches(function() loss(logits, te.ones { 5 }, 3, 6, 2, 1) end, "expected probs")
        assert.error_matches(function() loss(logits, te.ones { 6 }, 0, 6, 2, 1) end, "total_num_tokens")
    end)

    it("sorts chunks of rows", function()
        local x, probs = te.randn { 7, 3 }, te.rand { 7 }
        local y, p = te.moe_sort_chunks_by_index_with_probs(x, probs, { 2, 0, 4, 1 }, int32 { 3, 2, 1, 0 })
        local expected = te.tensor({ 6, 2, 3, 4, 5, 0, 1 }, { dtype = "int64" })
        assert.same(list(te.index_select(x, 1, expected)), list(y))
        assert.same(list(te.index_select(probs, 1, expected)), list(p))
        assert.same(list(y), list(te.moe_sort_chunks_by_index(x, int32 { 2, 0, 4, 1 }, { 3, 2, 1, 0 })))
        local function refuses(message, ...)
            local args = { ... }
            assert.error_matches(function() te.moe_sort_chunks_by_index(unpack(args)) end, message)
        end
        refuses("add up to 6 rows", x, { 2, 4 }, { 0, 1 })
        refuses("sorted_index%[2%] = 0, expected each of 0 to 1 once", x, { 3, 4 }, { 0, 0 })
        refuses("1 entries for 2 chunks", x, { 3, 4 }, { 1 })
        refuses("split_sizes%[1%]", x, { -1, 8 }, { 0, 1 })
        assert.same({ 0, 3 }, te.moe_sort_chunks_by_index(te.zeros { 0, 3 }, {}, {}).shape)
        local released = int32 { 3, 4 }
        released:release()
        refuses("te.moe_sort_chunks_by_index: split_sizes: tensor was released", x, released, { 0, 1 })
    end)
end)

describe("te.MoE", function()
    before_each(function() te.manual_seed(5) end)

    -- Every token through its experts, one after the other.
    local function naive(m, x, o)
        local ACTIVATIONS = { SwiGLU = te.swiglu, GEGLU = te.geglu, ClampedSwiGLU = te.clamped_swiglu }
        local function product(rows, weight, bias)
            local y = te.matmul(rows, weight:transpose(1, 2))
            return bias and y + bias or y
        end
        local function part(list, e) return list and list[e] end
        local activate = ACTIVATIONS[m.experts[2].__name]
        local logits = product(x, m.router.weight, m.router.bias)
        local probs = te.fused_topk_with_score_function(logits, m.topk, m.expert_bias, o)
        local sum
        for e = 1, m.num_experts do
            local hidden = activate(product(x, m.experts[1].weight[e], part(m.experts[1].bias, e)))
            local y = product(hidden, m.experts[3].weight[e], part(m.experts[3].bias, e)) * probs:narrow(2, e, 1)
            sum = sum and sum + y or y
        end
        if m.shared then
            local hidden = activate(product(x, m.shared[1].weight, m.shared[1].bias))
            local y = product(hidden, m.shared[3].weight, m.shared[3].bias)
            local gate = m.shared_gate and 1 / (1 + te.exp(-te.matmul(x, m.shared_gate.weight:transpose(1, 2)))) or 1
            sum = sum + y * gate
        end
        return sum
    end

    local function gradients(m, x, y, dy)
        m:zero_grad()
        x.grad = nil
        te.sum(y * dy):backward()
        local grads = { list(x.grad) }
        for name, p in m:named_parameters() do grads[name] = p.grad and list(p.grad) end
        return grads
    end

    for i, o in ipairs { {}, { topk = 1, score_function = "sigmoid", expert_bias = true, scaling_factor = 1.5 },
        { topk = 4, num_groups = 3, group_topk = 2, use_pre_softmax = true },
        { activation = "ClampedSwiGLU", bias = true, router_bias = true }, { shared = 24, bias = true },
        { activation = "GEGLU", shared = 9, shared_gate = true, topk = 6 } } do
        it("is the sum over experts, forward and backward, case " .. i, function()
            local m = te.MoE(12, 20, 6, o)
            if o.expert_bias then m.expert_bias:copy_(te.randn { 6 }) end
            te.no_grad(function()
                for _, p in ipairs(m:parameters()) do p:copy_(te.randn(p.shape) * 0.4) end
            end)
            local x, dy = te.randn { 17, 12 }, te.randn { 17, 12 }
            x.requires_grad = true
            local y, expected = m(x), naive(m, x, m.routing)
            near(list(expected), y, 1e-5)
            local got, wanted = gradients(m, x, y, dy), gradients(m, x, naive(m, x, m.routing), dy)
            for name, grad in pairs(wanted) do near(grad, te.tensor(got[name]), 2e-5) end
            assert.same({ 1, 17, 12 }, m(x:view { 1, 17, 12 }).shape)
            near(list(y), m(x:view { 1, 17, 12 }):view { 17, 12 }, 0)
        end)
    end

    it("stands in a container, under recipes and without tokens", function()
        local seq = te.Sequential(te.Residual(te.RMSNorm(32), te.MoE(32, 32, 4)), te.LayerNorm(32))
        local x = te.randn { 40, 32 }
        local y = seq(x)
        for _, recipe in ipairs { "DelayedScaling", "MXFP8BlockScaling", "NVFP4BlockScaling" } do
            local low = te.autocast({ recipe = te.recipe[recipe] {} }, function() return seq(x) end)
            local off = te.norm(low - y):item() / te.norm(y):item()
            assert.is_true(off > 0 and off < (recipe == "NVFP4BlockScaling" and 0.3 or 0.1), recipe .. " " .. off)
        end
        assert.equal("bfloat16", te.autocast({ dtype = "bfloat16" }, function() return seq[1][2](x) end).dtype)
        assert.same({ 0, 32 }, seq[1][2](te.zeros { 0, 32 }).shape)
        local idle = te.MoE(8, 8, 3, { aux_loss_coeff = 0.1 })
        local none = idle(te.zeros { 0, 8 })
        assert.same({ 0, 8 }, none.shape)
        local both = none:sum() + idle.aux_loss
        both:backward()
        assert.equal(0, both:item())
        assert.equal(0, idle.router.weight.grad:abs():sum():item())
        assert.error_matches(function() te.MoE(8, 8, 2, { topk = 3 }) end, "topk: 3 of 2 experts")
        assert.error_matches(function() te.MoE(8, 8, 2)(te.ones { 3, 4 }) end, "expected {..., 8}, got {3,4}")
        assert.error_matches(function() te.MoE(8, 8, 2, { top_k = 1 }) end, "did you mean \"topk\"")
        assert.error_matches(function() te.MoE(8, 8, 2, { shared_gate = true }) end, "there is no shared expert")
        assert.error_matches(function() te.MoE(8, 8, 2, { activation = "ReLU" }) end, "activation")
        assert.error_matches(function() te.MoE(8, 8, 2, { num_groups = 2 }) end,
            "te.MoE: option num_groups: 2, beside option group_topk, which is not given", 1, true)
        assert.error_matches(function() te.MoE(8, 8, 2, { group_topk = 1 }) end,
            "te.MoE: option group_topk: 1, beside option num_groups, which is not given", 1, true)
    end)

    it("shows what moves its rows to a profile", function()
        local m, x, seen = te.MoE(16, 16, 4), te.randn { 8, 16 }, {}
        x.requires_grad = true
        local profile = te.profile(function() te.sum(m(x)):backward() end)
        for _, kernel in ipairs(profile.events) do seen[kernel.name] = true end
        for _, name in ipairs { "choose", "map", "rows", "tokens", "weights" } do
            assert.is_true(seen["route_" .. name], name)
        end
    end)

    it("makes a Llama a mixture, whose balancing loss counts in training", function()
        local config = { vocab_size = 30, n_layer = 2, n_head = 2, n_embd = 32, n_inner = 16, block_size = 16,
            n_expert = 4, n_expert_active = 2, expert_aux_loss = 0.5 }
        local model = te.models.llama(config)
        local ids = te.randint(0, 29, { 2, 16 })
        local _, loss = model(ids, ids)
        local aux = model:auxiliary_loss():item()
        assert.is_true(aux >= 2 * 0.5 * 0.99) -- each layer's is at least its coefficient
        model:eval()
        local logits, plain = model(ids, ids)
        assert.near(loss:item() - aux, plain:item(), 1e-5)
        assert.equal(model:num_parameters() - 30 * 32 - 2 * 2 * 3 * 32 * 16, model:num_multiplying())
        local again = te.models.llama(config)
        again:load_state_dict(model:state_dict())
        again:eval()
        assert.same(list(logits), list((again(ids, ids))))
        local start = ids:narrow(2, 1, 3)
        assert.same(model:generate(start, 8, { temperature = 0, use_cache = false }):totable(),
            model:generate(start, 8, { temperature = 0 }):totable())
        assert.error_matches(function()
            te.models.llama { vocab_size = 30, n_head = 2, n_embd = 32, expert_aux_loss = 1 }
        end, "expert_aux_loss = 1 has no effect without n_expert")
        model:train()
        local optimizer, first, last = te.optim.AdamW(model:parameters(), { lr = 1e-2 })
        for _ = 1, 30 do
            local _, l = model(ids, ids)
            l:backward()
            optimizer:step()
            optimizer:zero_grad()
            first, last = first or l:item(), l:item()
        end
        assert.is_true(last < first - 1)
    end)
end)
