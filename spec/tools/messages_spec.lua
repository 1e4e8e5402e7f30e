--- Wrong scripts and what they say: the script's file and line, the function, the values, and nothing of C.

local te = require "te"

local TETRAIN = os.getenv("TETRAIN") or te._core.executable()

-- { the third line of a script, the line of the message, the message }
local wrong = {
    { [[te.matmul(te.ones(4, 3), te.ones(5, 2))]],
        3, [[te.matmul: inner sizes differ: {4, 3} x {5, 2}]] },
    { [[local y = te.ones(2, 3) + te.ones(4)]],
        3, [[te.add: shapes do not broadcast: {2, 3} and {4}]] },
    { [[te.ones(2, 3):view(7)]],
        3, [[te.view: {2, 3} (6 elements) cannot take the shape {7}]] },
    { [[te.ones(2, 3):view(-1, -1)]],
        3, [[te.view: {2, 3} (6 elements) cannot take the shape {-1, -1}]] },
    { [[te.linear(te.ones(2, 3), te.ones(4, 5))]],
        3, [[te.linear: inner sizes differ: x {2, 3}, weight {4, 5}]] },
    { [[te.cat({te.ones(2, 3), te.ones(2, 4)}, 1)]],
        3, [[te.cat: tensor 2 is {2, 4}, which does not continue {2, 3} along dimension 1]] },
    { [[te.softmax(te.ones(2), 3)]],
        3, [[te.softmax: dimension 3 of a tensor with 1 dimensions]] },
    { [[te.softmax(te.ones(2), 0)]],
        3, [[te.softmax: dim: 0 given, but dimensions and positions count from 1]] },
    { [[te.softmax(te.ones(2), "x")]],
        3, [[te.softmax: dim: expected a dimension (a whole number from 1), got string "x"]] },
    { [[te.softmax()]],
        3, [[te.softmax: argument x is missing]] },
    { [[te.softmax({1, 2})]],
        3, [[te.softmax: x: expected a tensor, got table]] },
    { [[te.softmax(te.ones(2), {dims = 1})]],
        3, [[te.softmax: unknown option "dims"; did you mean "dim"?]] },
    { [[te.softmax(te.ones(2), 1, 2, 3)]],
        3, [[te.softmax: argument 3, number 2, is too much: it takes softmax(x, dim: dim = -1)]] },
    { [[te.zeros("x")]],
        3, [[te.zeros: shape: expected a table of whole numbers, got string "x"]] },
    { [[te.zeros(-1)]],
        3, [[te.zeros: shape: negative size -1]] },
    { [[te.zeros(2.5)]],
        3, [[te.zeros: shape: expected a whole number, got number 2.5]] },
    { [[te.zeros({2, "a"})]],
        3, [[te.zeros: shape: expected a whole number, got string "a"]] },
    { [[te.zeros(2, {dtype = "floot32"})]],
        3, [[te.zeros: dtype: no dtype "floot32"; did you mean "float32"?]] },
    { [[te.zeros(2, {dtpye = "float32"})]],
        3, [[te.zeros: unknown option "dtpye"; did you mean "dtype"?]] },
    { [[te.tensor({{1, 2}, {3}})]],
        3, [[te.tensor: rows of different length: 2 and 1 entries at depth 2]] },
    { [[te.tensor({1, "a"})]],
        3, [[te.tensor: expected a number, got string "a"]] },
    { [[te.tensor()]],
        3, [[te.tensor: value: expected a number or a nested table, got nothing]] },
    { [[te.arange(1, 5, 0)]],
        3, [[te.arange: from 1 to 5 by 0 is no range]] },
    { [[te.full({2}, "x")]],
        3, [[te.full: value: expected a number, got string "x"]] },
    { [[te.randint(5, 1, {2})]],
        3, [[te.randint: no whole number from 5 to 1]] },
    { [[print(te.ones(2, 2)[5])]],
        3, [[index 5 out of range: the first dimension has 2 entries, counted from 1]] },
    { [[te.ones(2):item()]],
        3, [[te.item: tensor has 2 elements, shape {2}, not one]] },
    { [[print(te.ones(2).shpae)]],
        3, [[tensors have no field or method "shpae"; did you mean "shape"?]] },
    { [[te.ones(2).dtype = "float64"]],
        3, [[tensors have no field "dtype" that can be set]] },
    { [[te.ones(2):backward()]],
        3, [[te.backward: the tensor does not depend on anything that requires a gradient]] },
    { [[local x = te.ones({2}, {requires_grad = true}); (x * 2):backward()]],
        3, [[te.backward: a gradient is needed for a tensor of shape {2}]] },
    { [[local x = te.ones({1}, {requires_grad = true}) local y = (x * x):sum() y:backward() y:backward()]],
        3, [[te.sum: backward: this part of the graph was used before and its saved tensors are gone; pass retain_graph = true to the first backward]] },
    { [[te.cross_entropy(te.ones(2, 3), te.tensor({0, 5}, {dtype = "int64"}))]],
        3, [[te.cross_entropy: target 5 at position 1 is not a class from 0 to 2]] },
    { [[te.cross_entropy(te.ones(2, 3), te.ones(2))]],
        3, [[te.cross_entropy: targets must be int64, int32 or uint8, not float32]] },
    { [[te.embedding(te.ones(4, 2), te.tensor({9}, {dtype = "int64"}))]],
        3, [[te.embedding: embedding: id 9 at position 0 is outside 0 to 3]] },
    { [[te.gelu(te.ones(2), {approximate = "tahn"})]],
        3, [[te.gelu: approximate: "tahn" is none of tanh|none; did you mean "tanh"?]] },
    { [[te.layer_norm(te.ones(2, 3), te.ones(4))]],
        3, [[te.layer_norm: shapes do not broadcast: {2, 3} and {4}]] },
    { [[te.scaled_dot_product_attention(te.ones(2, 3), te.ones(2, 3), te.ones(2, 3))]],
        3, [[te.scaled_dot_product_attention: q {batch, heads, seq_q, dim}, k {batch, kv_heads, seq_kv, dim} and v {batch, kv_heads, seq_kv, dim_v} with heads a multiple of kv_heads are needed, not {2, 3}, {2, 3}, {2, 3}]] },
    { [[te.Linear(2)]],
        3, [[te.Linear: out_features: expected positive integer, got nil]] },
    { [[te.Linear("a", 2)]],
        3, [[te.Linear: in_features: expected positive integer, got "a"]] },
    { [[te.Linear(0, 2)]],
        3, [[te.Linear: in_features: expected positive integer, got 0]] },
    { [[te.Linear(2, 3, {bais = false})]],
        3, [[te.Linear: unknown option "bais", did you mean "bias"?]] },
    { [[te.Linear(2, 3, {bias = 1})]],
        3, [[te.Linear: option bias: expected boolean, got 1]] },
    { [[te.Linear(2, 3)(te.ones(2, 5))]],
        3, [[te.Linear: the input has shape {2, 5}, its last size must be in_features = 2]] },
    { [[te.Sequential(te.Linear(2, 3), 7)]],
        3, [[Sequential: expected a module or something callable, got number]] },
    { [[te.Sequential(te.Linear(2, 3)):insert(9, te.GELU())]],
        3, [[Sequential:insert: position 9 of 1 modules]] },
    { [[te.Dropout(2)]],
        3, [[te.Dropout: p: expected number from 0 to 1, got 2]] },
    { [[te.Lienar(2, 3)]],
        3, [[te has no "Lienar"; did you mean "Linear"?]] },
    { [[te.optim.Adam({})]],
        3, [[te.optim has no "Adam"; did you mean "AdamW"?]] },
    { [[te.recipe.DelayedScalin {}]],
        3, [[te.recipe has no "DelayedScalin"; did you mean "DelayedScaling"?]] },
    { [[te.ones(2):to { dtyp = "float16" }]],
        3, [[te.to: unknown option "dtyp", did you mean "dtype"?]] },
    { [[te.save("/dev/null", { a = te.ones(1) }, "text")]],
        3, [[te.save: metadata: expected a table of texts, got string]] },
    { [[te.Linear(2, 2, { params_dtype = "int64" })]],
        3, [[te.Linear: option params_dtype: expected one of float32, bfloat16, float16, float64, got "int64"]] },
    { [[te.Dropout(0.5, { inplace = true })]],
        3, [[te.Dropout: unknown option "inplace"]] },
    { [[te.Linear(2, 2):to("flot32")]],
        3, [[Linear:to: where: expected a dtype that has gradients or a device, got "flot32"; did you mean "float32"?]] },
    { [[te.Linear(2, 2):apply()]],
        3, [[Linear:apply: fn: expected callable, got nil]] },
    { [[te.set_fusion(0)]],
        3, [[te.set_fusion: on: expected boolean, got 0]] },
    { [[te.Sequential(te.ReLU()):explain()]],
        3, [[Sequential:explain: x: expected a tensor, got nil]] },
    { [[te.Sequential(te.ReLU()):insert("a", te.ReLU())]],
        3, [[Sequential:insert: i: expected integer, got "a"]] },
    { [[te.Sequential(te.ReLU()):pop(1.5)]],
        3, [[Sequential:pop: i: expected integer, got 1.5]] },
    { [[local seq = te.Sequential(te.ReLU()); seq[1] = 5; seq(te.ones(2))]],
        3, [[Sequential: module 1: expected callable, got 5]] },
    { [[te.profile(function() end):save_trace()]],
        3, [[profile:save_trace: path: expected string, got nil]] },
    { [[te.optim.AdamW({te.ones(2)}, {betas = {0.9}})]],
        3, [[te.optim.AdamW: option betas[2]: expected a number from 0 to below 1, got nil]] },
    { [[te.optim.AdamW({te.ones(2)}, {lr = "x"})]],
        3, [[te.optim.AdamW: option lr: expected number, at least 0, got "x"]] },
    { [[te.optim.AdamW(te.Linear(2, 2):parameters(), {learning_rate = 1})]],
        3, [[te.optim.AdamW: unknown option "learning_rate"]] },
    { [[te.load("/no/such/model.safetensors")]],
        3, [[te.load: /no/such/model.safetensors: cannot open: No such file or directory]] },
    { [[te.load(7)]],
        3, [[te.load: path: expected a string, got number 7]] },
    { [[te.save("/no/such/folder/x.safetensors", {x = te.ones(1)})]],
        3, [[te.save: /no/such/folder/x.safetensors: cannot create a temporary file beside it: No such file or directory]] },
    { [[te.save("/tmp/x", {x = 3})]],
        3, [[te.save: x: expected a tensor, got number 3]] },
    { [[te.manual_seed(1.5)]],
        3, [[te.manual_seed: seed: expected a whole number, got number 1.5]] },
    { [[te.manual_seed("x")]],
        3, [[te.manual_seed: seed: expected a whole number, got string "x"]] },
    { [[te.set_num_threads(-1)]],
        3, [[te.set_num_threads: n: -1 is not in 0 to 1024]] },
    { [[te.autocast({dtype = "int64"}, function() end)]],
        3, [[te.autocast: dtype: int64 is no compute dtype; use float32, bfloat16 or float16]] },
    { [[te.autocast({}, 3)]],
        3, [[te.autocast: expected a function, got number]] },
    { [[te.no_grad(3)]],
        3, [[te.no_grad: expected a function, got number]] },
    { [[te.rng_state("x")]],
        3, [[te.rng_state: state: expected what te.rng_state() returned, got string "x"]] },
    { [[te.topk(te.ones(3), 5)]],
        3, [[te.topk: k = 5 of 3 positions]] },
    { [[te.ones(3):narrow(1, 3, 2)]],
        3, [[te.narrow: positions 3 to 4 of dimension 1, which has 3]] },
    { [[te.ones(2, 3):permute(1, 1)]],
        3, [[te.permute: dimension 1 is named twice]] },
    { [[te.ones(2):to("flaot16")]],
        3, [[te.to: where: expected a dtype or a device, got "flaot16"; did you mean "float16"?]] },
    { [[te.where(1, 2, 3)]],
        3, [[te.where: at least one tensor is needed]] },
    { [[local M = te.Module:extend("M") M()(1)]],
        3, [[M: the class has no forward method]] },
    { [[te.Linear(2, 2):load_state_dict({})]],
        3, [[Linear:load_state_dict: missing: bias, weight]] },
    { [[local x = te.ones(2) x:release() print(x + 1)]],
        3, [[te.add: x: tensor was released]] },
    { [[te.gather(te.ones(2, 3), 2, te.tensor({{7}, {0}}, {dtype = "int64"}))]],
        3, [[te.gather: gather: index 7 at position 0 is outside 0 to 2]] },
    { [[te.help("sofmax")]],
        3, [[te.help: no operation "sofmax"; did you mean "softmax"?]] },
    { [[te.gradcheck(function(x) return x end, 3)]],
        3, [[te.gradcheck: inputs: expected a list of tensors, got number]] },
    { [[print(te.ones(2) .. "x")]],
        3, [[attempt to concatenate a userdata value]] },
    { [[print(te.ones(2) < te.ones(2))]],
        3, [[attempt to compare two userdata values]] },
    { [[print(te.ones(2) + {})]],
        3, [[te.add: operand 2: expected a tensor or number, got table]] },
    { [[print(te.ones(2) + "a")]],
        3, [[te.add: operand 2: expected a tensor or number, got string "a"]] },
    { [[te.empty(1e13)]],
        3, [[te.empty: out of memory: 40000000000000 bytes asked on cpu, 0 in use, limit 0]] },
    { [[te.split(te.ones(4), {1, 2})]],
        3, [[te.split: sizes sum to 3, dimension 1 has 4]] },
    { [[te.tokenizer.char("ab"):encode("abc")]],
        3, [[te.tokenizer: character "c" (code point 99) is not among the 2 known ones]] },
    { [[local x = nil + 1]],
        3, [[attempt to perform arithmetic on a nil value]] },
    { [[undefined_function()]],
        3, [[attempt to call global 'undefined_function' (a nil value)]] },
    { [[local t = {} t.x.y = 1]],
        3, [[attempt to index field 'x' (a nil value)]] },
    { [[error('my own message')]],
        3, [[my own message]] },
    { [[local x = = 1]],
        3, [[unexpected symbol near '=']] },
    { [[for i = 1, 3 do]],
        4, [['end' expected (to close 'for' at line 3) near '<eof>']] },
    { [[return #nil]],
        3, [[attempt to get length of a nil value]] },
    { [[te.ones(3):no_such_method()]],
        3, [[tensors have no field or method "no_such_method"]] },
}

-- What nobody should see of the implementation.
local inner = { "%[C%]", "%f[%w_]te_%a", "%f[%w_]luaL?_%a", "%.c:", "\tte/%a", "userdata:", "0x%x%x%x%x", "stack traceback:%s*$" }

local function run(text)
    local path, err = os.tmpname(), os.tmpname()
    local file = assert(io.open(path, "w"))
    file:write("local te = require \"te\"\n\n", text, "\n")
    file:close()
    local status = os.execute(("'%s' %s >/dev/null 2>%s"):format(TETRAIN, path, err))
    file = assert(io.open(err))
    local message = file:read "*a"
    file:close()
    os.remove(path)
    os.remove(err)
    message = message:gsub("==%d+==WARNING: AddressSanitizer[^\n]*\n", "") -- it announces large requests
    return (message:gsub(path:gsub("%p", "%%%0"), "SCRIPT")), status > 255 and status / 256 or status
end

describe("a wrong script", function()
    for _, case in ipairs(wrong) do
        local text, line, expected = unpack(case)
        it(text, function()
            local message, status = run(text)
            assert.equal(1, status)
            assert.equal(("tetrain: SCRIPT:%d: %s"):format(line, expected), message:match "^[^\n]*")
            for _, pattern in ipairs(inner) do
                assert.is_nil(message:find(pattern), message)
            end
        end)
    end

    it("shows the way to the mistake", function()
        local message = run "local function inner() error('deep') end\nlocal function outer() inner() return 1 end\nouter()"
        assert.equal("tetrain: SCRIPT:3: deep\nstack traceback:\n\tSCRIPT:3: in function 'inner'\n"
            .. "\tSCRIPT:4: in function 'outer'\n\tSCRIPT:5: in main chunk\n", message)
    end)

    it("keeps quiet about the library's own frames", function()
        local message = run "local function build() local m = te.Linear(2) return m end\nlocal m = build()"
        assert.equal("tetrain: SCRIPT:3: te.Linear: out_features: expected positive integer, got nil\nstack traceback:\n"
            .. "\tSCRIPT:3: in function 'build'\n\tSCRIPT:4: in main chunk\n", message)
    end)
end)
