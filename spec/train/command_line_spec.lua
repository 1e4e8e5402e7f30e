local te = require "te"
local shell = require "spec.support.shell"

local function make()
    return te.train.command_line {
        script = "x.lua", about = "About it.",
        { "learning-rate", "number", 1e-3, min = 0, max = 10, help = "how fast", section = "Training" },
        { "steps", "size", 100, help = "how long" },
        { "dtype", "string", "float32", choices = { "float32", "bfloat16" }, help = "of what" },
        { "resume", "boolean", false, help = "go on" },
        { "data", "string", help = "where from" },
        { "out", "string", "out", help = "where to" },
        presets = { fast = { learning_rate = 2, steps = 5 } },
    }
end

describe("te.train.command_line", function()
    local function fails(words, message)
        local ok, problem = pcall(make().parse, make(), words)
        assert.is_false(ok)
        assert.equal(2, problem.code)
        assert.is_truthy(problem.message:find(message, 1, true), problem.message)
    end

    it("has defaults", function()
        local o, given = make():parse {}
        assert.same({ learning_rate = 1e-3, steps = 100, dtype = "float32", resume = false, out = "out" }, o)
        assert.same({}, given)
    end)

    it("takes --key=value, --key value, - and _, and bare booleans", function()
        local o, given = make():parse { "--learning-rate=0.5", "--steps", "7", "--resume", "--data", "a=b" }
        assert.same({ 0.5, 7, true, "a=b" }, { o.learning_rate, o.steps, o.resume, o.data })
        assert.same({ learning_rate = 0.5, steps = 7, resume = true, data = "a=b" }, given)
        assert.equal(3, make():parse({ "--learning_rate", "3" }).learning_rate)
        assert.is_false(make():parse({ "--resume=false" }).resume)
        assert.is_false(make():parse({ "--resume", "false", "--steps=3" }).resume)
    end)

    it("puts presets between defaults and what is given", function()
        local o = make():parse { "--steps=9", "--preset=fast" }
        assert.same({ 2, 9 }, { o.learning_rate, o.steps })
        fails({ "--preset=slow" }, 'expected one of fast, got "slow"')
    end)

    it("names the option, what it takes and the nearest name", function()
        fails({ "--learnign-rate=1" }, "unknown option --learnign-rate, did you mean --learning-rate?")
        fails({ "--learning-rate=11" }, "--learning-rate: expected number from 0 to 10, got 11")
        fails({ "--learning-rate=nan" }, "expected number from 0 to 10")
        fails({ "--steps=2.5" }, "--steps: expected positive integer, got 2.5")
        fails({ "--steps=many" }, 'got "many"')
        fails({ "--steps" }, "--steps: expected positive integer")
        fails({ "--dtype=fp8" }, "expected one of float32, bfloat16")
        fails({ "--resume=perhaps" }, "--resume: expected boolean")
        fails({ "stray" }, 'unexpected argument "stray"')
    end)

    it("restores what nobody has said", function()
        local says = false
        local line = te.train.command_line { script = "x.lua", about = "It.", { "steps", "size", 1 },
            { "threads", "integer", 0, told = function() return says end } }
        local function restored(words)
            local o, given = line:parse(words)
            line:restore(o, given, { ["option.steps"] = "7", ["option.threads"] = "3" })
            return { o.steps, o.threads }
        end
        assert.same({ 7, 3 }, restored {})
        says = true
        assert.same({ 7, 0 }, restored {})
        assert.same({ 7, 5 }, restored { "--threads=5" })
    end)

    it("takes no empty text where there is another one by default", function()
        fails({ "--out=" }, 'x.lua: --out: expected a text, got ""')
        fails({ "--data", "" }, 'x.lua: --data: expected a text, got ""')
    end)

    it("prints help from the same table", function()
        local text = make():help()
        for _, part in ipairs { "usage: tetrain x.lua", "About it.", "Training", "--learning-rate", "how fast [0.001]",
            "one of float32, bfloat16", "fast: learning_rate=2 steps=5" } do
            assert.is_truthy(text:find(part, 1, true), part)
        end
    end)

    it("carries values through a checkpoint, given ones first", function()
        local cl = make()
        local texts = cl:texts((cl:parse { "--learning-rate=0.1", "--steps=3", "--data=d" }))
        assert.is_nil(texts["option.resume"])
        local o, given = cl:parse { "--steps=8", "--resume" }
        cl:restore(o, given, texts)
        assert.same({ 0.1, 8, "d", true }, { o.learning_rate, o.steps, o.data, o.resume })
    end)

    it("tells what differs from a checkpoint, which has the default of what it does not say", function()
        local cl = make()
        local _, given = cl:parse { "--learning-rate=0.5", "--steps=100" }
        assert.same({ "learning-rate", "0.5", "0.001" }, { cl:changed(given, {}, { "steps", "learning-rate" }) })
        assert.same({ "steps", "100", "7" }, { cl:changed(given, { ["option.steps"] = "7" }, { "steps" }) })
        assert.is_nil(cl:changed(given, { ["option.learning_rate"] = "0.5" }, { "steps", "learning-rate" }))
        local named = te.train.command_line { script = "s", { "from", "string" } }
        local o, said = named:parse { "--from=a" }
        assert.equal("a", o.from)
        assert.same({ "from", "a", "the default" }, { named:changed(said, {}, { "from" }) })
        assert.is_nil(named:changed({}, {}, { "from" }))
    end)

    it("tells its values as they would be typed", function()
        local cl = make()
        local third = cl:words((cl:parse { "--learning-rate=0.3333333333333333", "--out=x" }), { "out", "dtype" })
        assert.same({ ["--learning-rate"] = "0.3333333333333333", ["--steps"] = "100", ["--resume"] = "false" }, third)
        assert.equal("0.1", cl:words((cl:parse { "--learning-rate=0.1" }), {})["--learning-rate"])
    end)

    it("complains in one write, beside which other processes may have theirs", function()
        local script = [[
local te = require "te"
io.stderr = { write = function(_, ...) print(select("#", ...), ...) end }
te.train.run(function() te.train.fail(te.train.exit.usage, "no") end)]]
        local text, code = shell.capture(("%s -e '%s'"):format(os.getenv "TETRAIN" or "build/tetrain", script))
        assert.same({ 2, "1\tno\n\n" }, { code, text })
    end)

    it("takes what a preset says as given", function()
        local cl = make()
        local o, given = cl:parse { "--preset=fast", "--steps=3" }
        assert.same({ preset = "fast", learning_rate = 2, steps = 3 }, given)
        cl:restore(o, given, { ["option.learning_rate"] = "0.1", ["option.data"] = "d" })
        assert.same({ 2, 3, "d" }, { o.learning_rate, o.steps, o.data })
    end)
end)
