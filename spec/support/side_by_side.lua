-- Models that are trained the same way, one whole and one divided or sharded: the small models and batches that
-- processes draw for them, their steps, and what must come out of both.

local te = require "te"
local alike = require "spec.support.alike"

local side_by_side = { VOCAB = 29, SEQ = 8 }
local VOCAB, SEQ = side_by_side.VOCAB, side_by_side.SEQ

--- A table with the fields of both; those of `more` win.
function side_by_side.merged(fields, more)
    local made = {}
    for name, value in pairs(fields) do made[name] = value end
    for name, value in pairs(more or {}) do made[name] = value end
    return made
end

--- The model of a kind with this vocabulary and length, its weights drawn from the same seed each time.
function side_by_side.model(kind, config)
    te.manual_seed(17)
    return te.models[kind](side_by_side.merged({ vocab_size = VOCAB, block_size = SEQ }, config))
end

--- Draws ids and targets of two sequences.
function side_by_side.batch(length)
    local shape = { 2, length or SEQ }
    local ids = te.randint(0, VOCAB - 1, shape)
    return ids, te.randint(0, VOCAB - 1, shape)
end

--- Draws a list of `count` pairs of ids and targets.
function side_by_side.micro_batches(count)
    local list = {}
    for i = 1, count do list[i] = { side_by_side.batch() } end
    return list
end

--- How both go on from their gradients: SGD makes the steps of each.
local Pair = {}
Pair.__index = Pair

function side_by_side.pair(one, own)
    local pair = setmetatable({ one = one, own = own, optimizers = {} }, Pair)
    for i, model in ipairs { one, own } do pair.optimizers[i] = te.optim.SGD(model:parameters(), { lr = 0.1 }) end
    return pair
end

--- The norm of the gradients, which both have.
function Pair:norm(name, tolerance)
    local norm = te.optim.grad_norm(self.one)
    alike.near(name .. ", norm", te.full({}, te.optim.grad_norm(self.own)), te.full({}, norm), tolerance)
    return norm
end

--- A step of both, with gradients of no larger norm than this.
function Pair:step(largest)
    for _, model in ipairs { self.one, self.own } do te.optim.clip_grad_norm(model, largest) end
    for _, optimizer in ipairs(self.optimizers) do
        optimizer:step()
        optimizer:zero_grad()
    end
end

--- A step with gradients averaged over a group, nil: of all processes. Returns their norm.
function side_by_side.averaged_step(model, optimizer, group, options)
    te.distributed.average_gradients(model, { group = group })
    local norm = te.optim.grad_norm(model)
    optimizer:step(options)
    optimizer:zero_grad()
    return norm
end

--- Norms of the same steps are the same, up to the order in which they are added up.
function side_by_side.same_norms(name, want, norms)
    for step, norm in ipairs(want) do
        alike.check(math.abs(norm / norms[step] - 1) < 1e-6, "%s: norms %g, %g", name, norm, norms[step])
    end
end

--- The first model's tensors and its optimizer's are those of the second, bit by bit.
function side_by_side.same_states(name, model, optimizer, other, others)
    local state = other:state_dict()
    for key, tensor in pairs(model:state_dict()) do alike.same(("%s: %s"):format(name, key), tensor, state[key]) end
    local states = others:state_dict().state
    for i, saved in pairs(optimizer:state_dict().state) do
        for slot, value in pairs(saved) do
            if te.is_tensor(value) then alike.same(("%s: %s %d"):format(name, slot, i), value, states[i][slot]) end
        end
    end
end

return side_by_side
