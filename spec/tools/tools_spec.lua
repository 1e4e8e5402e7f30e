--- The tools of the executable: what they print, draw and refuse.

local te = require "te"

local TETRAIN = os.getenv("TETRAIN") or te._core.executable()
local folder

local function write(name, text)
    local path = folder .. "/" .. name
    local file = assert(io.open(path, "wb"))
    file:write(text)
    file:close()
    return path
end

local function read(path)
    local file = assert(io.open(path, "rb"))
    local text = file:read "*a"
    file:close()
    return text
end

-- Output, errors and exit status of a command line.
local function run(arguments)
    local out, err = folder .. "/out", folder .. "/err"
    local status = os.execute(("'%s' %s >%s 2>%s </dev/null"):format(TETRAIN, arguments, out, err))
    return read(out), read(err), status > 255 and status / 256 or status
end

describe("tetrain", function()
    before_each(function()
        folder = os.tmpname()
        os.remove(folder)
        te._core.mkdir(folder)
    end)
    after_each(function() os.execute("rm -rf " .. folder) end)

    it("says what every tool does", function()
        for _, tool in ipairs { "train", "generate", "inspect", "plan", "bench", "doctor", "plot" } do
            local out, err, status = run(tool .. " --help")
            assert.equal(0, status, err)
            assert.is_truthy(out:find("usage: tetrain " .. tool, 1, true), out)
            assert.equal(out:find("\n  --", 1, true) ~= nil, out:find("[--option=value …]", 1, true) ~= nil, out)
            _, err, status = run(tool .. " --no-such-option")
            assert.equal(2, status)
            assert.is_truthy(err:find(tool .. ": unknown option --no-such-option", 1, true), err)
        end
    end)

    it("inspects safetensors files", function()
        local path = folder .. "/m.safetensors"
        te.save(path, { weight = te.tensor { { 1, 2, 3 }, { 4, 5, 6 } }, ids = te.tensor({ 7 }, { dtype = "int64" }) },
            { about = ("long "):rep(40), step = "3" })
        local out, err, status = run("inspect " .. path)
        assert.equal(0, status, err)
        assert.is_truthy(out:find(path .. ": 2 tensors, 7 elements, 32 B\n", 1, true), out)
        assert.is_truthy(out:find("  weight  float32   {2, 3}  24 B\n", 1, true), out)
        assert.is_truthy(out:find("  ids     int64     {1}  8 B\n", 1, true), out)
        assert.is_truthy(out:find("  step = 3\n", 1, true) and out:find("(200 characters)", 1, true))
        out = run("inspect --values " .. path)
        assert.is_truthy(out:find("mean 3.5  std 1.708  min 1  max 6", 1, true), out)
    end)

    it("prints names of any length in one line", function()
        local path, long = folder .. "/m.safetensors", ("a"):rep(120)
        te.save(path, { [long] = te.ones { 2 }, ["b\27[31m\nc"] = te.ones { 1 } }, { ["k\n"] = "v" })
        local out, err, status = run("inspect " .. path)
        assert.equal(0, status, err)
        assert.is_truthy(out:find(("\n  k  = v\n  %s  float32   {2}  8 B\n"):format(long), 1, true), out)
        assert.is_truthy(out:find(("\n  b [31m c%s  float32   {1}  4 B\n"):format((" "):rep(112)), 1, true), out)
    end)

    it("names dtypes that tensors do not have as the file does", function()
        local json = '{"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]},'
            .. '"s":{"dtype":"F8_E8M0","shape":[3],"data_offsets":[2,5]},'
            .. '"z":{"dtype":"I16","shape":[0],"data_offsets":[5,5]}}'
        local path = write("foreign.safetensors", string.char(#json) .. ("\0"):rep(7) .. json .. "\1\255\1\2\3")
        local out, err, status = run("inspect --values " .. path)
        assert.equal(0, status, err)
        assert.is_truthy(out:find("  a  I8        {2}  2 B  mean 0  std 1  min -1  max 1\n", 1, true), out)
        assert.is_truthy(out:find("  s  F8_E8M0   {3}  3 B\n", 1, true), out)
        assert.is_truthy(out:find("  z  I16       {0}  0 B\n", 1, true), out)
    end)

    it("refuses damaged and missing files", function()
        local path = write("bad.safetensors", "\255\255\255\255\255\255\255\127{}")
        local _, err, status = run("inspect " .. path)
        assert.equal(74, status)
        assert.is_truthy(err:find(path, 1, true), err)
        _, err, status = run("inspect " .. folder .. "/none")
        assert.equal(74, status)
        assert.is_truthy(err:find(folder .. "/none: cannot open: No such file or directory", 1, true), err)
        _, err, status = run "inspect"
        assert.equal(2, status)
        assert.is_truthy(err:find("FILE... is missing", 1, true), err)
    end)

    it("draws runs", function()
        local lines = {}
        for step = 1, 50 do
            lines[step] = ('{"step":%d,"loss":%.4f,"lr":0.001,"grad_norm":%.3f,"ms":2.5,"tokens_per_s":%d}')
                :format(step, 4 / step, 1 + step / 50, 1000 + step)
        end
        te._core.mkdir(folder .. "/a")
        te._core.mkdir(folder .. "/b")
        write("a/metrics.jsonl", table.concat(lines, "\n") .. "\n")
        write("b/metrics.jsonl", table.concat(lines, "\n", 1, 20) .. '\n{"step":21,"lo') -- cut off
        local out, err, status = run(("plot %s/a %s/b"):format(folder, folder))
        assert.equal(0, status, err)
        for _, part in ipairs { "loss\n", "tokens/s\n", "gradient norm\n", "* a: 50 steps, last loss 0.0800",
            "+ b: 20 steps" } do
            assert.is_truthy(out:find(part, 1, true), part)
        end
        local svg = read(folder .. "/a/plot.svg")
        local _, curves = svg:gsub("<polyline", "")
        assert.equal(6, curves)
        assert.is_truthy(svg:find "^<svg " and svg:find "</svg>%s*$")
        -- the first loss is the highest point of its panel, the last the lowest: y counts downwards
        local first, last = svg:match 'points="[%d.]+,([%d.]+) .- [%d.]+,([%d.]+)"/>'
        assert.is_true(tonumber(first) < tonumber(last))
        run(("plot --terminal=false --panel=grad_norm --from=3 --svg=%s/y.svg %s/a"):format(folder, folder))
        local part = read(folder .. "/y.svg")
        assert.is_truthy(part:find("gradient norm", 1, true))
        assert.is_falsy(part:find("tokens/s", 1, true))
        assert.is_true(#part:match 'points="([^"]*)"' < #svg:match 'points="([^"]*)"')
        local only = run(("plot --terminal=false --svg=%s/x.svg %s/a"):format(folder, folder))
        assert.equal(folder .. "/x.svg\n", only)
        for options, problem in pairs { ["--from=51"] = "there is nothing of a step from 51 on",
            ["--panel=loss --from=51"] = "there is no loss of a step from 51 on" } do
            _, err, status = run(("plot %s %s/a"):format(options, folder))
            assert.equal("plot: " .. problem .. "\n", err)
            assert.equal(2, status)
            assert.equal(svg, read(folder .. "/a/plot.svg"))
        end
        _, err, status = run(("plot %s"):format(folder))
        assert.equal(74, status)
        assert.is_truthy(err:find("metrics.jsonl: No such file", 1, true), err)
    end)

    it("draws a run in the terminal whose folder takes no file", function()
        te._core.mkdir(folder .. "/a")
        write("a/metrics.jsonl", '{"step":1,"loss":2}\n{"step":2,"loss":1}\n')
        te._core.mkdir(folder .. "/a/plot.svg") -- root writes everywhere, but not here
        local out, err, status = run(("plot %s/a"):format(folder))
        assert.equal(0, status)
        assert.is_truthy(out:find("* a: 2 steps, last loss 1.0000", 1, true))
        assert.is_truthy(err:find("^plot: no SVG: .*plot%.svg: "), err)
        write("a/metrics.jsonl", '{"step":1,"loss":2}\n{"step":2,"lo')
        assert.is_truthy(run(("plot %s/a"):format(folder)):find("* a: 1 step, last loss 2.0000", 1, true))
        _, err, status = run(("plot --svg=%s/a/plot.svg %s/a"):format(folder, folder))
        assert.equal(74, status)
    end)

    it("draws runs of one value, large ones, and none that is not finite", function()
        for i, value in ipairs { "0", "9007199254740992", "1e17", "-1e300", "1.7e308" } do
            local name = "c" .. i
            te._core.mkdir(folder .. "/" .. name)
            local lines = {}
            for step = 1, 3 do
                lines[step] = ('{"step":%d,"loss":1,"grad_norm":%s}\n{"step":%d,"loss":1e400,"grad_norm":1e400}\n')
                    :format(step, value, step)
            end
            write(name .. "/metrics.jsonl", table.concat(lines))
            local out, err, status = run(("plot %s/%s"):format(folder, name))
            assert.equal(0, status, value .. err)
            assert.is_truthy(out:find("gradient norm", 1, true) and out:find("3 steps, last loss 1.0000", 1, true), out)
            assert.is_falsy(read(folder .. "/" .. name .. "/plot.svg"):find "[^%a]nan[^%a]", value)
        end
    end)

    it("says what the prompt takes on the command line", function()
        local out, err, status = run "repl --help"
        assert.equal(0, status, err)
        assert.is_truthy(out:find("usage: tetrain repl", 1, true), out)
        out, err, status = run "repl extra"
        assert.equal(2, status)
        assert.equal('repl: unexpected argument "extra" (--help lists the options)\n', err)
    end)

    it("says that --help takes no value, and bounds in full", function()
        local _, err, status = run "bench --help=3"
        assert.equal(2, status)
        assert.equal("bench: --help takes no value (--help lists the options)\n", err)
        _, err = run "bench --rows=0"
        assert.equal("bench: --rows: expected positive integer, at most 1048576, got 0 (--help lists the options)\n",
            err)
    end)

    it("examines the machine", function()
        local out, err, status = run "doctor"
        assert.equal(0, status, out .. err)
        for _, name in ipairs { "tetrain ", "processor ", "kernels ", "products ", "training ", "files ", "cuda " } do
            assert.is_truthy(out:find("\n" .. name, 1, true) or out:find("^" .. name), name)
        end
        assert.is_truthy(out:find "nothing is off\n$")
        assert.is_nil(out:find("not there: cuda", 1, true))
    end)

    it("measures kernels", function()
        local out, err, status = run "bench --rows=64 --width=64 --seconds=0.001 --threads=1"
        assert.equal(0, status, err)
        for _, name in ipairs { "copy", "gelu", "layer_norm", "linear", "attention" } do
            assert.is_truthy(out:find("\n" .. name .. "[^\n]+ms +[%d.]+ G"), name)
        end
    end)

    it("plans what a script returns, or says why not", function()
        local cases = {
            ["return 3"] = "plan: expected a model, got number",
            ["local te = require 'te' return te.ones(2)"] = "plan: expected a model, got a tensor",
            ["local te = require 'te' return te.Linear(2, 2), te.ones(1, 2)"] =
                "plan: a Linear has no plan of its own: put it into a te.Sequential",
            [""] = "returns nothing; it should return a model and its inputs",
            ["local x ="] = "unexpected symbol near '<eof>'",
        }
        for text, message in pairs(cases) do
            local path = write("script.lua", text)
            local _, err, status = run("plan " .. path)
            assert.equal(1, status, text)
            assert.is_truthy(err:find(message, 1, true), err)
        end
        local broken = write("broken.lua", "local function f() error 'odd' end\nf()\n")
        local _, message, code = run("plan " .. broken)
        assert.equal(1, code)
        assert.equal(("%s:1: odd\nstack traceback:\n\t%s:1: in function 'f'\n\t%s:2: in main chunk\n"):gsub("%%s",
            function() return broken end), message)
        local path = write("model.lua", [[
            local te = require "te"
            assert(arg[0]:find "model%.lua$" and arg[1] == "--width" and select("#", ...) == 2)
            local model = te.Sequential(te.Linear(4, 4), te.GELU())
            if not model.explain then function model:explain(x) return "stand-in for " .. x.shape[1] end end
            return model, te.ones { 2, 4 }]])
        local out, err, status = run("plan " .. path .. " --width 4")
        assert.equal(0, status, err)
        assert.is_truthy(#out > 10)
    end)

    it("trains and generates", function()
        local data = write("text.txt", ("the quick brown fox jumps over the lazy dog\n"):rep(60))
        local out, err, status = run(("train --data=%s --out=%s/run --steps=2 --n-layer=1 --n-embd=16 --n-head=2 "
            .. "--block=16 --eval-batches=1 --sample-tokens=0"):format(data, folder))
        assert.equal(0, status, err)
        assert.is_truthy(out:find("step 2", 1, true))
        out, err, status = run(("generate --out=%s/run --tokens=5 --prompt=the"):format(folder))
        assert.equal(0, status, err)
        assert.equal(9, #out)
        -- by the name that was typed
        te.data.write_tokens(folder .. "/shard.bin", te.full({ 400 }, 7, { dtype = "int32" }))
        _, err, status = run(("train --data=%s/shard.bin --vocab-size=7 --out=%s/run"):format(folder, folder))
        assert.equal(74, status)
        assert.equal(("%s/shard.bin: token 0 is 7, of a vocabulary of 7\n"):format(folder), err)
        _, err = run("train --n-embd=16 --n-head=3")
        assert.equal("train: --n-embd=16 is no multiple of --n-head=3\n", err)
        _, err = run(("generate --out=%s/run --top-p=0"):format(folder))
        assert.equal("generate: --top-p: expected a number above 0, got 0\n", err)
    end)
end)
