--- What te.help, completion and the editor's annotations say of options, against what constructors and functions check.

local te = require "te"
local complete = require "te.tools.complete"
local options = require "te.options"
local reference = require "te.tools.reference"

local function has(text, part) assert.is_truthy(text:find(part, 1, true), ("%s\nis not in\n%s"):format(part, text)) end

local function nothing() end
local function double(x) return x * 2 end

-- Everything with declared options, and everything else that is a class.
local function entries()
    local found = {}
    for _, entry in ipairs(reference.entries()) do
        if entry.kind == "module" then
            for _, member in ipairs(reference.members(entry.name)) do
                if member.options then found[member.name] = member end
            end
        elseif entry.options or entry.kind == "class" then
            found[entry.name] = entry
        end
    end
    return found
end

-- Arguments before the options, by name.
local ARGUMENTS = {
    Linear = { 4, 4 }, BasicLinear = { 4, 4 }, Bias = { 4 }, GroupedLinear = { 2, 4, 4 }, LayerNorm = { 4 },
    RMSNorm = { 4 }, Embedding = { 4, 4 }, MultiHeadedSelfAttention = { 8, 2 }, GroupedQueryAttention = { 8, 2, 1 },
    MultiQuerySelfAttention = { 8, 2 }, MoE = { 8, 8, 4 }, Dropout = { 0.1 }, StochasticDepth = { 0.1 },
    ConstantScale = { 2 }, Reshape = { { 2 } }, Pointwise = { double }, ["optim.AdamW"] = { { te.ones { 1 } } },
    ["optim.SGD"] = { { te.ones { 1 } } }, ["optim.Muon"] = { { te.ones { 1, 1 } } },
    ["optim.grad_clip"] = { {} }, rope_frequencies = { 4 },
    graph = { double, {} }, make_graphed_callables = { double, {} }, ["numerics.watch"] = { te.Linear(2, 2) },
    ["distributed.average_gradients"] = { {} }, ["distributed.broadcast_parameters"] = { {} },
    ["distributed.pipeline_step"] = { te.models.gpt { vocab_size = 2, n_layer = 1, n_embd = 4, n_head = 1 }, {} },
    ["models.from_hugging_face"] = { "/none" }, ["models.embedder"] = { "/none" },
    ["models.to_hugging_face"] = { te.models.gpt { vocab_size = 2, n_layer = 1, n_embd = 4, n_head = 1 }, "/none" },
    ["lora.add"] = { te.Linear(4, 4) }, ["lora.save"] = { te.lora.add(te.Sequential(te.Linear(4, 4))), "/none" },
    register_forward_fusion = { double }, register_backward_fusion = { double },
    parallel_cross_entropy = { te.ones { 1, 2 }, te.zeros { 1 } },
    ["data.write_tokens"] = { "/none.bin", {} },
}
local OPTIONS_FIRST = { autocast = true, fp8_autocast = true, quantized_model_init = true, fp8_model_init = true }
local BASES = { Module = true, BasicOperation = true, FusedOperation = true, Sequential = true }

local function value_of(name)
    local value = te
    for part in name:gmatch "[^.]+" do value = value[part] end
    return value
end

-- Names of the options that it checks, from what it says to one that there is nowhere.
local function checked(name)
    local args = { unpack(ARGUMENTS[name] or {}) }
    args[#args + 1] = { zzzzzzzz = 1 }
    if OPTIONS_FIRST[name] then args[2] = nothing end
    local ok, message = pcall(value_of(name), unpack(args))
    assert.is_false(ok, name .. " takes any option")
    if message:find "it takes none" then return {} end
    local known = message:match 'unknown option "zzzzzzzz"; known are (.*)$'
    assert(known, ("%s: %s"):format(name, message))
    local names = {}
    for option in known:gmatch "[%w_]+" do names[#names + 1] = option end
    return names
end

describe("declared options", function()
    it("are those that are checked", function()
        local n = 0
        for name, entry in pairs(entries()) do
            if not BASES[name] then
                assert.same(checked(name), options.names(entry.options or {}), name)
                n = n + 1
            end
        end
        assert.is_true(n > 60)
    end)

    it("have a sentence each, which help gives", function()
        for name, entry in pairs(entries()) do
            local text = te.help(name)
            for _, row in ipairs(options.rows(entry.options or {})) do
                assert.is_truthy(row[2].help and #row[2].help > 3, ("%s: %s has no help"):format(name, row[1]))
                has(text, ("\n  %s ("):format(row[1]))
                has(text, "): " .. row[2].help)
            end
        end
    end)

    it("of methods, too", function()
        local optimizer, model = te.optim.SGD { te.ones { 1 } }, te.models.gpt { vocab_size = 2, n_layer = 1,
            n_embd = 8, n_head = 1, block_size = 4 }
        has(te.help(optimizer.step), "  grad_scale (number, default 1): ")
        has(te.help(model.generate), "  top_k (positive integer): ")
    end)

    it("of a class are those of a class that derives from it, unless that has an init of its own", function()
        local Mine, Own = te.Linear:extend("Mine"), te.Linear:extend("Own")
        function Own:init() end
        assert.equal(options.of(te.Linear), options.of(Mine))
        assert.is_nil(options.of(Own))
        assert.is_nil(options.of({}))
        assert.is_nil(options.of(3))
    end)
end)

describe("te.help", function()
    it("gives signature, sentence and options with type, range and default", function()
        local text = te.help "MultiHeadedSelfAttention"
        assert.equal("te.MultiHeadedSelfAttention(hidden_size, num_heads, opts)", text:match "^[^\n]*")
        has(text, "\nSelf-attention: ")
        has(text, "\n  window_left (integer, at least -1, default -1): how many tokens back a token attends")
        has(text, "\n  dropout (number from 0 to below 1, default 0): dropout of attention probabilities")
        has(text, "\n  init_method (function): ")
        has(text, "\n  softmax_type (one of vanilla, off-by-one, learnable, default vanilla): ")
        has(text, "\n  rope.scaling.factor (number, default 1): ")
        has(te.help "optim.AdamW", "\n  betas (table, default { 0.9, 0.999 }): ")
        has(te.help "optim.SGD", "\n  momentum (number, at least 0, default 0): ")
        has(te.help "GELU", "Gaussian error linear unit")
        has(te.help "AllReduce", "The sum over all processes.")
        has(te.help "Pointwise", "are fixed then")
        has(te.help "pointwise", "pass numbers that change as arguments")
        has(te.help "data.open", "\n  returns te.DataSet set: n_tokens, n_train")
    end)

    it("does not begin the sentence with the name that the signature has", function()
        has(te.help "optim.AdamW", "te.optim.AdamW(params, opts)\nAdam with decoupled weight decay")
        has(te.help "profile", "te.profile(fn)\nRuns fn and returns the kernels")
        for name, entry in pairs(entries()) do
            assert.is_nil(entry.doc:find("te." .. name .. ":", 1, true), name)
        end
    end)

    it("knows what stands in libraries, by name and by value", function()
        for _, name in ipairs { "optim.AdamW", "optim.SGD", "models.gpt", "models.llama", "data.open",
            "recipe.DelayedScaling", "train.steps", "train.checkpoint.save", "numerics.watch",
            "distributed.average_gradients", "initializers.normal", "tokenizer.load" } do
            local text = te.help(name)
            assert.equal("te." .. name .. "(", text:match "^[^\n(]*%(")
            assert.equal(text, te.help("te." .. name))
            assert.equal(text, te.help(value_of(name)))
        end
        has(te.help "optim", "\nmembers: AdamW Muon SGD ")
        has(te.help "models", " gpt llama")
        has(te.help(te.optim), "te.optim: optimizers")
    end)

    it("knows the methods of classes, with a dot or a colon", function()
        for _, name in ipairs { "Module:clone", "KVCache:append", "models.gpt:generate", "optim.AdamW:step",
            "Linear:requires_grad_" } do
            local text = te.help(name)
            assert.equal("te." .. name .. "(", text:match "^[^\n(]*%(")
            assert.equal(text, te.help("te." .. name))
            assert.equal(text, te.help((name:gsub(":", "."))))
        end
        has(te.help "models.gpt:generate", "\n  top_p (number from 0 to 1): ")
        for _, name in ipairs { "Module:nothing", "Module.__call", "Linear.takes" } do
            assert.error_matches(function() te.help(name) end, "te.help: no operation ", 1, true)
        end
    end)

    it("says what functions that make tensors take", function()
        has(te.help "zeros", "\n  shape (te.Shape): sizes, { 2, 3 } or 2, 3\n")
        for _, name in ipairs { "zeros", "arange", "randint", "tensor", "ones_like" } do
            for _, option in ipairs { "dtype", "device", "requires_grad" } do
                has(te.help(name), "\n  " .. option .. " (")
            end
        end
        has(te.help "arange", "te.arange(n) is 1 to n. int64 if first and step are integers, else float32.")
        assert.equal("int64 float32 int64 bool float32", table.concat({ te.arange(3).dtype, te.arange(0, 1, 0.5).dtype,
            te.randint(0, 1, { 1 }).dtype, te.tensor({ true }).dtype, te.tensor({ 1 }).dtype }, " "))
        has(te.help "swiglu", "x {..., 2 n} holds a, then b; y {..., n}.")
    end)

    it("lists what te.ops has", function() has(te.help "ops", "\nmembers: AddExtraInput AllGather ") end)

    it("knows what classes of one's own write", function()
        has(te.help "BasicOperation", "The base of custom operations, ")
        has(te.help "BasicOperation", "\nmethods: lower op_backward op_forward")
        has(te.help "FusedOperation", "The base of operations that replace several basic operations, ")
        for _, name in ipairs { "BasicOperation:op_forward", "BasicOperation:op_backward", "BasicOperation:lower",
            "FusedOperation:fuser_forward", "FusedOperation:fuser_backward" } do
            assert.equal("te." .. name .. "(", te.help(name):match "^[^\n(]*%(")
            assert.equal(te.help(name), te.help(name:match "[%w_]+$"))
        end
    end)

    it("knows what functions return, and its methods", function()
        has(te.help "Plan", "\nmethods: dot floors json svg")
        has(te.help "Profile", "\nfields: events (table[]), seconds (number)\n")
        has(te.help "profile", "returns te.Profile; ?Profile lists its methods")
        has(te.help "distributed.world", "; ?Group lists its methods")
        assert.equal("plan:dot()", te.help("plan:dot"):match "^[^\n]*")
        assert.equal("optimizer:step(opts)", te.help("Optimizer:step"):match "^[^\n]*")
        assert.equal(te.help "Optimizer:step", te.help "step")
        assert.equal("x:backward(grad, opts)", te.help("Tensor:backward"):match "^[^\n]*")
        has(te.help "explain", "model:explain(ids)\n")
        has(te.help "explain", "\nte.Sequential:explain(x, ...)\n")
        assert.equal("te.Sequential:forward(x, ...)", te.help("Sequential:forward"):match "^[^\n]*")
        has(te.help "all_gather", "group:all_gather(x)\n")
        has(te.help "load", "returns table<string, te.Tensor> tensors\n")
    end)

    it("lists the methods of an object", function()
        local model = te.Sequential(te.Linear(2, 2))
        has(te.help(model), "\nMethods: append apply ")
        has(te.help(model:explain(te.ones { 1, 2 })), "\nMethods: dot floors json svg")
        has(te.help(te.optim.SGD(model)), " set_lr set_option state_dict step")
        has(te.help(te.distributed.world()), "\nMethods: all_gather all_reduce ")
    end)

    it("says whether a function without source is one of C", function()
        assert.equal("a Lua function whose source is not at hand", te.help(loadstring "return 1"))
        assert.equal("a function written in C", te.help(string.rep))
    end)

    it("says what a name of elsewhere is here, and what te is", function()
        has(te.help "TransformerLayer", "TransformerLayer is no name here: build it of te.Residual")
        has(te.help "te.nn", "nn is no name here: modules and functions are reached through te")
        assert.equal(require("te.tools.help").text(), te.help "te")
        assert.equal(te.help "te", te.help(te))
    end)

    it("says what computes the same where a function is missing", function()
        local names = require("te.tools.elsewhere").names
        local function value(name, given)
            given.te, given.math = te, math
            return setfenv(assert(loadstring("return " .. (names[name]:gsub(" of .*", "")))), given)():totable()
        end
        local ids = te.tensor({ 1, 1, 3 }, { dtype = "int64" })
        local a, b = te.tensor { 3, 4 }, te.tensor { 4, 3 }
        assert.same({ { 12, 9 }, { 16, 12 } }, value("outer", { a = a, b = b }))
        assert.same({ 3, -4 }, value("floor_divide", { a = te.tensor({ 7, -7 }, { dtype = "int64" }), b = 2 }))
        assert.same({ 0, 2, 0, 1 }, value("bincount", { n = 4, ids = ids }))
        assert.same({ 1, 1, 1, 1, 3, 3 }, value("repeat_interleave", { x = ids, dim = 1, k = 2, n = 3 }))
        assert.same({ true, false }, value("isclose", { a = te.tensor { 1, 2 }, b = te.tensor { 1, 3 } }))
        assert.same({ 0, 0.25, 0.5, 0.75, 1 }, value("linspace", { first = 0, last = 1, n = 5 }))
        assert.same({ 1, -0.5 }, { value("elu", { x = te.tensor { 1, -math.log(2) } })[1], -0.5 })
        assert.near(0.96, te.tensor(value("cosine_similarity", { a = a:view(1, 2), b = b:view(1, 2) })):item(), 1e-6)
        assert.near(1.0625, te.smooth_l1_loss(te.tensor { 0.5, 2.5 }, te.zeros { 2 }):item(), 1e-6)
        assert.equal(24, te.tensor(value("dot", { a = a, b = b })):item())
        assert.equal(2, te.tensor(value("count_nonzero", { x = te.tensor { 0, 3, -1 } })):item())
        assert.near(0.865098, value("mish", { x = te.ones(1) })[1], 1e-6)
        assert.near(24, te.tensor { value("prod", { x = te.tensor { 2, 3, 4 }, dim = 1 }) }:item(), 1e-4)
    end)

    it("names the nearest in a library", function()
        for wrong, right in pairs { ["optim.Adam"] = "optim.AdamW", ["te.models.gtp"] = "models.gpt" } do
            assert.error_matches(function() te.help(wrong) end, ('did you mean "%s"?'):format(right), 1, true)
        end
        for _, name in ipairs { "optim.", "optim.AdamW.x", ".optim", "no.such.thing", "te.no.such" } do
            assert.error_matches(function() te.help(name) end, "te.help: no operation ", 1, true)
        end
    end)

    it("has no argument for what checks that there are no more", function()
        assert.equal("te.save(path, tensors, metadata)", te.help("save"):match "^[^\n]*")
        assert.equal("te.no_grad(fn, ...)", te.help("no_grad"):match "^[^\n]*")
    end)
end)

describe("annotations of several lines", function()
    local path = os.tmpname()
    after_each(function() os.remove(path) end)

    it("belong to their parameter or result", function()
        local file = assert(io.open(path, "w"))
        assert(file:write [[
--- Does something,
--- and says so.
---@param first table|nil  one: which
---                        goes on; two:
---  and on
---@param second fun(a: integer, b: table): table
---@return table made  a thing
---  of parts
---@return string|nil
return function(first, second) return first, second end]])
        file:close()
        local known = reference.of_function(dofile(path))
        assert.equal("Does something,\nand says so.", known.doc)
        assert.same({ { name = "first", type = "table|nil", doc = "one: which goes on; two: and on" },
            { name = "second", type = "fun(a: integer, b: table): table" } }, known.params)
        assert.same({ "table", "string|nil" }, known.results)
        assert.same({ { type = "table made", doc = "a thing of parts" }, { type = "string|nil" } }, known.returned)
    end)

    it("of the library are whole", function()
        has(te.help "save", "or with tables in it, like an optimizer's state_dict, which may hold numbers")
        has(te.help "quantize", "refused where factors follow from the values; seed of stochastic rounding")
        for _, name in ipairs { "save", "quantize", "quantized_model_init", "numerics.watch" } do
            local entry = reference.find(name)
            assert.is_truthy(entry.doc:find "%.$", entry.doc)
            for _, p in ipairs(entry.params) do assert.is_falsy(p.doc and p.doc:find "[,;]$", p.doc) end
        end
        assert.equal("Updates the parameters from their gradients: all of them, or none when something fails.",
            reference.of_function(require("te.optim.optimizer").step).doc)
    end)
end)

describe("completion", function()
    it("knows what stands in libraries, also behind ?", function()
        rawset(_G, "te", te)
        for before, name in pairs { ["?optim.Ad"] = "AdamW", ["?te.optim.SG"] = "SGD", ["te.models.ll"] = "llama",
            ["? data.op"] = "open", ["te.distributed.average_"] = "average_gradients" } do
            assert.same({ name }, (complete.candidates(before)), before)
        end
        rawset(_G, "te", nil)
    end)
end)

describe("tetrain.d.lua", function()
    local text = require "te.tools.annotations"()

    it("has a class of the options of everything that takes some", function()
        for name, entry in pairs(entries()) do
            if entry.options then
                local fields = text:match(("\n%%-%%-%%-@class te%%.%s%%.Options\n(.-)\n\n"):format((name:gsub("%.",
                    "%%."))))
                assert(fields, name)
                for option in pairs(entry.options) do has(fields .. "\n", ("---@field %s? "):format(option)) end
            end
        end
        has(text, '---@field approximate? "tanh"|"none" ')
        has(text, "---@field bias? boolean add a bias (true)")
        has(text, "---@param opts? te.Linear.Options\n---@return te.Linear\nfunction te.Linear(")
        has(text, "---@return te.Optimizer\nfunction te.optim.AdamW(params, opts) end")
        has(text, "---@param opts te.autocast.Options\n---@param fn function\n")
    end)

    it("declares what stands in libraries", function()
        local chunk = assert(loadstring(text, "=tetrain.d.lua"))()
        for _, entry in ipairs(reference.entries()) do
            if entry.kind == "module" and entry.name ~= "ops" then
                for _, member in ipairs(reference.members(entry.name)) do
                    local value = chunk
                    for part in member.name:gmatch "[^.]+" do value = value and value[part] end
                    assert.is_not_nil(value, member.name)
                end
            end
        end
        has(text, "\nfunction Decoder:generate(ids, count, opts) end")
    end)

    it("types what takes tensors, functions and paths, and what objects have", function()
        for _, part in ipairs { "---@return table<string, te.Tensor>\n", "\nfunction Tensor:backward(grad, opts) end",
            "\n---@class te.Plan\n---@field forward table[]\n", "\n---@class te.Profile\n", "\n---@class te.Group\n",
            "\n---@class te.Tokenizer\n", "\n---@class te.DataSet\n", "---@field main_grad te.Tensor|nil\n",
            "---@return te.Plan\nfunction Sequential:explain(x, ...) end",
            "---@return te.Group\nfunction te.distributed.world", "---@return te.Profile\nfunction te.profile(fn) end",
            "---@return te.Tokenizer\nfunction te.tokenizer.load(", "---@param path string\n---@param tensors table ",
            "\nfunction BasicOperation:op_backward(ctx, dy, ...) end",
            "---@param in_features integer\n---@param out_features integer\n---@param opts? te.Linear.Options\n",
        } do has(text, part) end
        assert.is_nil(text:find("userdata", 1, true))
        for _, name in ipairs { "split", "chunk", "to", "no_grad", "checkpoint", "autocast", "profile", "gradcheck",
            "save" } do
            for _, p in ipairs(reference.find(name).params) do
                assert.is_true(p.name == "..." or p.type ~= "any", name .. " " .. p.name)
            end
        end
    end)
end)

describe("docs/operations.md", function()
    it("lists the options of everything that takes some", function()
        local file = assert(io.open "docs/operations.md")
        local text = file:read "*a"
        file:close()
        for name, entry in pairs(entries()) do
            if entry.options and not name:find "^recipe%." then has(text, ("\n* `te.%s("):format(name)) end
        end
    end)

    it("names nothing of te that is not there", function()
        local file = assert(io.open "docs/operations.md")
        for name in file:read("*a"):gsub("te%.tools%.", ""):gmatch "%f[%w_.]te%.([%a_][%w_]*)" do
            assert.is_truthy(pcall(function() return te[name] end), "te." .. name)
        end
        file:close()
    end)
end)
