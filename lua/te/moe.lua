--- te.MoE: a mixture of experts in an MLP's place, and what goes with it.
--
--     local mlp = te.Residual(te.RMSNorm(512), te.MoE(512, 1024, 8, { topk = 2 }))
--     local y = mlp(x)
--
-- A linear router gives every token a logit per expert, te.fused_topk_with_score_function chooses topk of them, and
-- each token's rows go to its experts, gated MLPs, whose results come back weighted by its probabilities. No token is
-- dropped. The rows of all experts are in one matrix, sorted by expert: te.moe_permute, two te.GroupedLinear around one
-- activation, te.moe_unpermute. Beside them an expert may stand that sees every token (Dai et al. 2024), its result
-- whole or times the sigmoid of a gate of its own (Qwen2).
--
-- With `group` each of its processes has num_experts / size of the experts, and rows of x of its own: those go to the
-- processes that have their experts and back (te.distributed.experts). Router and shared expert are in each of them.

local te = require "te"
local fail = require "te.fail"
local hooks = require "te.hooks"
local options = require "te.options"
local initializers = require "te.initializers"
local collective = require "te.ops.collective"
local declared = require "te.ops.declared"

local moe = {}

-- Chunks of rows and where they go, as numbers.
local function chunks_of(who, x, split_sizes, sorted_index)
    local function list(name, given)
        if options.tensor(who, name, given) then given = given:totable() end
        options.argument(who, name, given, { "table" })
        for i, value in ipairs(given) do
            options.argument(who, ("%s[%d]"):format(name, i), value, { "integer", min = 0 })
        end
        return given
    end
    local sizes, order, first, at = list("split_sizes", split_sizes), list("sorted_index", sorted_index), {}, 1
    for i, size in ipairs(sizes) do first[i], at = at, at + size end
    if not options.tensor(who, "x", x) or x:dim() == 0 or at - 1 ~= x:size(1) then
        fail("%s: split_sizes add up to %d rows of x, which is %s", who, at - 1,
            te.is_tensor(x) and options.shape(x) or type(x))
    end
    local seen = {}
    for i, from in ipairs(order) do
        if from >= #sizes or seen[from] then
            fail("%s: sorted_index[%d] = %d, expected each of 0 to %d once", who, i, from, #sizes - 1)
        end
        seen[from] = true
    end
    if #order ~= #sizes then fail("%s: sorted_index has %d entries for %d chunks", who, #order, #sizes) end
    return sizes, order, first
end

local function join_chunks(x, sizes, order, first)
    local parts = {}
    for i, from in ipairs(order) do parts[i] = x:narrow(1, first[from + 1], sizes[from + 1]) end
    return parts[1] and te.cat(parts, 1) or x
end

--- x's rows in chunks of split_sizes rows, put in the order of sorted_index: numbers of chunks, from 0. Both are lists
--- or tensors that the host reads.
function moe.sort_chunks_by_index(x, split_sizes, sorted_index)
    return join_chunks(x, chunks_of("te.moe_sort_chunks_by_index", x, split_sizes, sorted_index))
end

--- The same with probs {rows}, which are ordered alike.
---@return te.Tensor rows
---@return te.Tensor probs
function moe.sort_chunks_by_index_with_probs(x, probs, split_sizes, sorted_index)
    local who = "te.moe_sort_chunks_by_index_with_probs"
    local sizes, order, first = chunks_of(who, x, split_sizes, sorted_index)
    if not options.tensor(who, "probs", probs) or probs:dim() ~= 1 or probs:size(1) ~= x:size(1) then
        fail("%s: probs: expected {%d}, got %s", who, x:size(1), te.is_tensor(probs) and options.shape(probs) or
            type(probs))
    end
    return join_chunks(x, sizes, order, first), join_chunks(probs, sizes, order, first)
end

--- The loss that grows as tokens gather at few experts (Fedus et al. 2022, equation 4, for topk choices; Transformer
--- Engine's fused_moe_aux_loss): coeff E / (topk T^2) sum over e of tokens_per_expert[e] sum over t of probs[t, e].
---@param probs te.Tensor  {tokens, experts}, of all experts
---@param tokens_per_expert te.Tensor  {experts}
---@param total_num_tokens number  T, of all micro batches that tokens_per_expert counts
function moe.fused_aux_loss(probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff)
    local who = "te.fused_moe_aux_loss"
    local numbers = { total_num_tokens = total_num_tokens, num_experts = num_experts, topk = topk }
    for name, value in pairs(numbers) do options.argument(who, name, value, { "number", min = 1 }) end
    options.argument(who, "coeff", coeff, { "number" })
    local fits = te.is_tensor(probs) and te.is_tensor(tokens_per_expert) and probs:dim() == 2
        and probs:size(2) == num_experts and tokens_per_expert:dim() == 1 and tokens_per_expert:size(1) == num_experts
    if not fits then
        fail("%s: expected probs {tokens, %d} and tokens_per_expert {%d}", who, num_experts, num_experts)
    end
    local dtype = probs.dtype == "float64" and "float64" or "float32" -- counts and their sums leave float16's range
    local sums = te.sum(probs:to(dtype), 1) * tokens_per_expert:to(dtype)
    return (te.sum(sums) * (coeff * num_experts / (topk * total_num_tokens ^ 2))):to(probs.dtype)
end

--- A mixture of experts.
local MoE = te.Module:extend("MoE")
MoE.own_products = { "router", "shared_gate" } -- fields of layers whose weight is read, which te.lora leaves alone

local OPTIONS = {
    topk = { "size", 2, help = "experts per token" },
    score_function = { "string", "softmax", choices = { "softmax", "sigmoid", "sqrtsoftplus" },
        help = "function from logits to probabilities" },
    use_pre_softmax = { "boolean", false, help = "probabilities over all experts, not just the selected" },
    num_groups = { "size", help = "groups of experts, of which group_topk take part" },
    group_topk = { "size", help = "see num_groups" },
    scaling_factor = { "number", 1, help = "factor of the probabilities" },
    expert_bias = { "boolean", false,
        help = "a buffer {experts} added to the scores when selecting experts; not with softmax" },
    aux_loss_coeff = { "number", 0, min = 0,
        help = "coefficient of the load-balancing loss, field aux_loss after forward" },
    activation = { "string", "SwiGLU", choices = { "SwiGLU", "GEGLU", "ClampedSwiGLU" }, help = "of experts" },
    bias = { "boolean", false, help = "bias of the experts' products" },
    router_bias = { "boolean", false, help = "bias of the router's product" },
    shared = { "size", help = "inner width of a shared expert, which sees every token; default: none" },
    shared_gate = { "boolean", false,
        help = "multiply the shared expert by sigmoid(linear(x)), one number per token" },
    init_method = declared.INIT,
    output_layer_init_method = { "callable",
        help = "for the experts' second products; default: init_method" },
    group = { "any",
        help = "group of te.distributed that experts are split over; default: not split" },
}

-- The experts of this process: how many there are, and what fills them with their part of what fills all.
local function share_experts(self, who, group)
    local all, here = self.num_experts, self.num_experts
    if group ~= nil then group = collective.group(who, "group", group) end
    if not group then return here, function(init) return init end end
    local experts, before = require "te.distributed.experts", nil
    before, here = collective.share(who, "num_experts", all, group)
    self.group = group
    return here, function(init) return experts.initializer(init, before, here, all - before - here) end
end

--- A mixture of experts in place of an MLP: a router sends every token to topk of num_experts gated MLPs.
---@param hidden number  width of tokens
---@param inner number   width inside an expert
function MoE:init(hidden, inner, num_experts, opts)
    local who = "te.MoE"
    opts = options.check(who, opts, OPTIONS)
    self.hidden = options.argument(who, "hidden", hidden, { "size" })
    self.inner = options.argument(who, "inner", inner, { "size" })
    self.num_experts = options.argument(who, "num_experts", num_experts, { "size" })
    if opts.topk > num_experts then fail("%s: topk: %d of %d experts", who, opts.topk, num_experts) end
    self.topk, self.aux_loss_coeff = opts.topk, opts.aux_loss_coeff
    self.routing = { score_function = opts.score_function, use_pre_softmax = opts.use_pre_softmax,
        num_groups = opts.num_groups, group_topk = opts.group_topk, scaling_factor = opts.scaling_factor }
    if opts.expert_bias and opts.score_function == "softmax" then
        fail('%s: option expert_bias: beside score_function "sigmoid" or "sqrtsoftplus", not "softmax"', who)
    end
    if (opts.num_groups == nil) ~= (opts.group_topk == nil) then
        local given, other = "num_groups", "group_topk"
        if opts.group_topk then given, other = other, given end
        fail("%s: option %s: %d, beside option %s, which is not given", who, given, opts[given], other)
    end
    if opts.shared_gate and not opts.shared then fail("%s: option shared_gate: there is no shared expert", who) end
    local init = opts.init_method or initializers.default
    local first = { bias = opts.bias, init_method = init }
    local second = { bias = opts.bias, init_method = opts.output_layer_init_method or init }
    -- no recipe quantizes the products of router and gate
    local function plain(n_out, bias)
        return te.quantized_model_init({ enabled = false }, te.Linear, hidden, n_out,
            { bias = bias, init_method = init })
    end
    self.router = plain(num_experts, opts.router_bias)
    if opts.expert_bias then self:register_buffer("expert_bias", te.zeros { num_experts }) end
    local here, part_of = share_experts(self, who, opts.group)
    local function products(n_in, n_out, o)
        return te.GroupedLinear(here, n_in, n_out, { bias = o.bias, init_method = part_of(o.init_method) })
    end
    self.experts = te.Sequential(products(hidden, 2 * inner, first), te[opts.activation](),
        products(inner, hidden, second))
    if self.group then te.distributed.hold_apart(self.experts, self.group) end
    if not opts.shared then return end
    self.shared = te.Sequential(
        te.Linear(hidden, 2 * opts.shared, first),
        te[opts.activation](),
        te.Linear(opts.shared, hidden, second))
    if opts.shared_gate then self.shared_gate = plain(1, false) end
end
options.declare(MoE.init, OPTIONS)

-- What the shared expert makes of rows.
local function share(self, x)
    local y = self.shared(x)
    return self.shared_gate and y * te.sigmoid(hooks.product(self.shared_gate, x)) or y
end

-- What the experts make of rows, which are in their order; sizes: rows of each. Comes with the sizes of all processes.
local function work(self, rows, sizes)
    if not self.group then return self.experts(rows, sizes, sizes), sizes end
    local experts = require "te.distributed.experts"
    local plan = experts.plan(self.group, sizes)
    local here = experts.sizes_here(plan)
    local y = experts.from_experts(plan, self.experts(experts.to_experts(plan, rows), here, here))
    return y, experts.totals(plan)
end

-- The loss that balances the experts. Of several processes each has the share of its tokens, times their number: the
-- average is the loss of one process that has all tokens.
local function balance(self, logits, sizes)
    local size, total = 1, logits:size(1)
    if self.group then
        size, total = self.group.size, 0
        for _, n in ipairs(sizes) do total = total + n / self.topk end
        sizes = te.tensor(sizes, { device = logits.device })
    end
    if total == 0 then return logits:to(logits.dtype == "float64" and "float64" or "float32"):sum() end -- 0
    local _, scores = te.fused_compute_score_for_moe_aux_loss(logits, self.topk,
        { score_function = self.routing.score_function })
    return moe.fused_aux_loss(scores, sizes, total, self.num_experts, self.topk, self.aux_loss_coeff * size)
end

-- Rows of tokens to experts and back.
local function mix(self, x)
    local logits = hooks.product(self.router, x)
    local probs, map = te.fused_topk_with_score_function(logits, self.topk, self.expert_bias, self.routing)
    local sizes = te.sum(map, 1)
    local rows, places = te.moe_permute(x, map, x:size(1) * self.topk)
    local made, all_sizes = work(self, rows, sizes)
    local balances = self.training and self.aux_loss_coeff > 0
    rawset(self, "aux_loss", balances and balance(self, logits, all_sizes) or nil)
    local y = te.moe_unpermute(made, places, probs)
    return self.shared and y + share(self, x) or y
end

--- x {..., hidden}. In training with aux_loss_coeff > 0 the balancing loss of this call stands in self.aux_loss
--- afterwards, to be added to the model's. Inside te.checkpoint nothing is recorded yet: there the function has to
--- return it, beside its result. All processes of the option `group` call it, each with rows of its own.
function MoE:forward(x)
    if not te.is_tensor(x) or x:dim() == 0 or x:size(-1) ~= self.hidden then
        fail("te.MoE: x: expected {..., %d}, got %s", self.hidden, te.is_tensor(x) and options.shape(x) or type(x))
    end
    local shape = x.shape
    if #shape == 2 then return mix(self, x) end
    return mix(self, x:reshape { -1, self.hidden }):view(shape)
end

function MoE:describe()
    return ("hidden=%d, inner=%d, num_experts=%d, topk=%d%s"):format(self.hidden, self.inner, self.num_experts,
        self.topk, self.group and ", " .. tostring(self.group) or "")
end

moe.MoE = MoE
return moe
