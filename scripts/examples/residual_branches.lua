-- Residual branches: one block of a Transformer's MLP, written in three ways that compute the same.
--
--     tetrain scripts/examples/residual_branches.lua

local te = require "te"

te.manual_seed(1)
local hidden = 64
local norm, up, gelu = te.RMSNorm(hidden), te.Linear(hidden, 4 * hidden), te.GELU()
local down, dropout = te.Linear(4 * hidden, hidden), te.Dropout(0)

-- 1. te.Residual adds its input to what its modules make of it.
local residual = te.Residual(norm, up, gelu, down, dropout)

-- 2. The two ends of the branch as operations of their own. MakeExtraOutput returns its input a second time, behind
--    the result; AddExtraInput takes it as an argument behind x. They need not stand in one container, and what lies
--    between the halves is up to you.
local first_half = te.Sequential(te.MakeExtraOutput(), norm, up, gelu)
local second_half = te.Sequential(down, dropout, te.AddExtraInput())

local function in_halves(x)
    local h, skip = first_half(x)
    return second_half(h, skip)
end

-- 3. By hand.
local function by_hand(x) return x + down(te.gelu(up(norm(x)))) end

local x = te.randn({ 8, hidden })
local expected = by_hand(x)
print(("te.Residual differs by %g"):format((residual(x) - expected):abs():max():item()))
print(("two halves differ by %g"):format((in_halves(x) - expected):abs():max():item()))

-- While training, a branch may be left out for some of the sequences of a batch (stochastic depth).
local deep = te.Residual(norm, up, gelu, down, te.StochasticDepth(0.5))
local batch = te.randn({ 6, 10, hidden })
local change = (deep(batch) - batch):abs():sum({ 2, 3 })
print(("%d of 6 sequences took the branch"):format(te.gt(change, 0):to("int64"):sum():item()))

deep:eval()
print(("in evaluation all do: %s"):format(tostring(te.gt((deep(batch) - batch):abs():sum({ 2, 3 }), 0):all():item())))
