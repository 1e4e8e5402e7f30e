--- The executable: options, scripts, exit statuses, messages.

local te = require "te"

local TETRAIN = os.getenv("TETRAIN") or te._core.executable()

-- Runs a command line of the shell; output, errors and exit status.
local function shell(command, input)
    local out, err, source = os.tmpname(), os.tmpname(), os.tmpname()
    local file = io.open(source, "wb")
    file:write(input or "")
    file:close()
    local status = os.execute(("{ %s\n} >%s 2>%s <%s"):format(command, out, err, source))
    local function take(path)
        local f = io.open(path, "rb")
        local text = f:read("*a")
        f:close()
        os.remove(path)
        return text
    end
    os.remove(source)
    return take(out), take(err), status > 255 and status / 256 or status
end

-- Runs the executable.
local function run(arguments, input) return shell(("'%s' %s"):format(TETRAIN, arguments), input) end

local written = {}

local function script(text)
    local name = os.tmpname()
    local path = name .. ".lua"
    local file = io.open(path, "wb")
    file:write(text)
    file:close()
    written[#written + 1], written[#written + 2] = name, path
    return path
end

describe("tetrain", function()
    after_each(function()
        for _, path in ipairs(written) do os.remove(path) end
        written = {}
    end)

    it("runs code, modules, scripts and standard input", function()
        assert.equal("3\n", (run [[-e 'print(1 + 2)']]))
        assert.equal("3\n", (run [[-l te.options -e 'print(options and 3)']]))
        assert.equal("true nil\n", (run([[-l te.options -e 'print(options ~= nil, arg)']]):gsub("\t", " ")))
        assert.equal("2 a b\n", (run(script("print(select('#', ...), ...)") .. " a b"):gsub("\t", " ")))
        assert.equal("x y\n", (run(script("print(arg[1] .. ' ' .. arg[2])") .. " x y")))
        assert.equal("hello\n", (run("-", "print('hello')")))
        assert.equal("hello\n", (run("", "print('hello')")))
        assert.equal("true\n", (run(script("print(arg[0]:find('%.lua$') ~= nil)"))))
    end)

    it("takes any name of a module as it is", function()
        for _, name in ipairs { "x]==] print(1) --[==[", ("long"):rep(3000), "a'b\"c\\n" } do
            local quoted = "'" .. name:gsub("'", "'\\''") .. "'"
            local out, err, status = run("-l " .. quoted)
            assert.equal("", out)
            assert.equal(1, status)
            assert.is_truthy(err:find("module '" .. name:sub(1, 100), 1, true), err:sub(1, 300))
        end
    end)

    it("fails where its output cannot be written", function()
        for _, words in ipairs { "-e 'print(1)'", "-e 'print(1) os.exit(0)'", "--help" } do
            local _, err, status = shell(("'%s' %s >/dev/full"):format(TETRAIN, words))
            assert.equal(74, status)
            assert.equal("tetrain: cannot write standard output: No space left on device\n", err)
        end
        local _, _, status = shell(("'%s' -e 'local x = 1' >&-"):format(TETRAIN))
        assert.equal(0, status)
    end)

    it("prints into no file that a script opens where standard ones are closed", function()
        local path = os.tmpname()
        local code = ("local f = io.open([[%s]], 'w') print(1) io.stdout:flush() io.stderr:write(2) f:write(3)")
            :format(path)
        local _, _, status = shell(("'%s' -e \"%s\" >&- 2>&-"):format(TETRAIN, code))
        local file = io.open(path)
        local text = file:read "*a"
        file:close()
        os.remove(path)
        assert.equal("3", text)
        assert.equal(74, status)
    end)

    it("loses nothing that waits to be written when a script that listens is asked to stop", function()
        local path = script [[
            local te = require "te"
            te._core.interrupt_flag()
            os.execute "(sleep 0.3; kill -TERM $PPID) >/dev/null &"
            for i = 1, 30000 do assert(io.write(("%08d\n"):format(i))) end
            os.exit(te._core.interrupt_flag() and 75 or 0)
        ]]
        local out, err = shell(("{ '%s' %s; echo $?; } | { sleep 1; cat; }"):format(TETRAIN, path))
        assert.equal("", err)
        assert.equal("00030000\n75\n", out:sub(-12))
        assert.equal(30000 * 9 + 3, #out)
    end)

    it("goes on where a file grows past the limit, and leaves nothing half written", function()
        local folder = os.tmpname()
        os.remove(folder)
        te._core.mkdir(folder)
        local _, err, status = shell(("(ulimit -f 100; '%s' -e 'te.save(\"%s/a\", { a = te.ones(1e6) })')"):format(
            TETRAIN, folder))
        local left = te._core.list_dir(folder)
        os.execute("rm -r " .. folder)
        assert.equal(1, status)
        assert.is_truthy(err:find("File too large", 1, true), err)
        assert.same({}, left)
    end)

    it("says its version and options", function()
        assert.equal("tetrain " .. te.version .. "\n", (run "--version"))
        assert.is_truthy(run("--help"):find("--threads", 1, true))
        assert.equal(run("--help"), (run("-h")))
    end)

    it("ends with 2 for a wrong command line, naming the option and the value", function()
        for wrong, message in pairs {
            ["--no-such-option"] = 'unknown option "--no-such-option"',
            ["--thread=2"] = 'unknown option "--thread=2"; did you mean --threads?',
            ["--sed 1"] = 'unknown option "--sed"; did you mean --seed?',
            ["--Version"] = 'unknown option "--Version"; did you mean --version?',
            ["-x"] = 'unknown option "-x"', ["-ix"] = 'unknown option "-ix"',
            ["--threads=x"] = '--threads: "x" is no whole number up to 1024',
            ["--threads=2000"] = '--threads: "2000" is no whole number up to 1024',
            ["--threads=2.5"] = '--threads: "2.5" is no whole number',
            ["--threads="] = '--threads: "" is no whole number',
            ["--threads"] = "--threads needs a value", ["--seed=-1"] = '--seed: "-1" is no whole number',
            ["--seed=99999999999999999999"] = '--seed: "99999999999999999999" is no whole number',
            ["-e"] = "-e needs a value", ["-l"] = "-l needs a value",
            ["--mem-limit=lots"] = '--mem-limit: "lots" is no size like 512M or 8G',
            ["--mem-limit=0"] = '"0" is no size',
            ["--mem-limit=1GB"] = '"1GB" is no size', ["--mem-limit=99999999999T"] = "is no size",
            ["--version=3"] = "--version takes no value", ["--device"] = "--device needs a value",
        } do
            local out, err, status = run(wrong)
            assert.equal(2, status, wrong)
            assert.equal("", out)
            assert.is_truthy(err:find("tetrain: " .. message, 1, true) or err:find(message, 1, true),
                wrong .. ": " .. err)
            assert.is_truthy(err:find('Try "tetrain --help".', 1, true))
        end
    end)

    it("names a variable with a value that means nothing", function()
        for setting, expected in pairs { ["TE_CPU_ISA=bogus"] = "portable, avx2 or avx512",
            ["TE_CPU_ISA=avx"] = "portable", ["TE_TRACE=bogus"] = "dispatch, fuse or both",
            ["TE_TRACE=dispatch,fused"] = "dispatch", ["TETRAIN_CUDNN=yes"] = "0 or all",
            ["TETRAIN_GEMM_CANDIDATES=0"] = "a whole number from 1 to 10000",
            ["TETRAIN_GEMM_CANDIDATES=8x"] = "a whole number", ["TETRAIN_GEMM_CANDIDATES=10001"] = "a whole number",
            ["TETRAIN_CUDNN_WORKSPACE=1G"] = "a number of MiB" } do
            local _, err, status = shell(("%s '%s' -e 'print(1)'"):format(setting, TETRAIN))
            assert.equal(2, status)
            assert.is_truthy(err:find(("tetrain: %s: expected %s"):format(setting, expected), 1, true), err)
        end
        for _, setting in ipairs { "TE_CPU_ISA=", "TE_CPU_ISA=portable", "TE_CPU_ISA=avx512", "TE_TRACE=dispatch",
            "TETRAIN_CUDNN=all", "TETRAIN_CUDNN=", "TETRAIN_GEMM_CANDIDATES=10000", "TETRAIN_CUDNN_WORKSPACE=0.5" } do
            assert.equal("1\n", (shell(("%s '%s' -e 'print(1)'"):format(setting, TETRAIN))))
        end
    end)

    it("reports plans as they are made under TE_TRACE=fuse", function()
        local code = "te.Sequential(te.Linear(4, 4), te.GELU(), te.Dropout(0.5))(te.ones { 2, 4 }):sum():backward()"
        local out, err, status = shell(("TE_TRACE=dispatch,fuse '%s' -e '%s'"):format(TETRAIN, code))
        assert.equal(0, status)
        assert.equal("", out)
        assert.is_truthy(err:find("^fuse: a plan of 3 operations and their gradients for float32 {2,4}\n"), err)
        assert.is_truthy(err:find("fuse:   backward wgrad, of linear: %d+ bytes read, %d+ written, %d+ FLOP\n"), err)
        assert.is_truthy(err:find("fuse:   apart: linear | gelu_tanh: a matrix product", 1, true), err)
        local program = "\nfuse:   gelu_tanh+dropout_apply: 1 inputs, 0 parameters, 1 generators\nfuse:     %0 elem"
        assert.is_truthy(err:find(program, 1, true), err)
        assert.equal("", select(2, shell(("TE_TRACE=dispatch '%s' -e '%s'"):format(TETRAIN, code))))
    end)

    it("hands everything after the script to it", function()
        local path = script("print(table.concat(arg, ' ')) print(select('#', ...))")
        assert.equal("--threads -e - --help --seed=1\n5\n", (run(path .. " --threads -e - --help --seed=1")))
        assert.equal("-x\n1\n", (run("--threads 1 -- " .. path .. " -x")))
    end)

    it("keeps tensors within --mem-limit", function()
        local code = [[-e 'local te = require "te" te.zeros(2^20)']]
        local _, _, status = run("--mem-limit 16M " .. code)
        assert.equal(0, status)
        local _, err
        _, err, status = run("--mem-limit=1M " .. code)
        assert.equal(1, status)
        assert.is_truthy(err:find("out of memory", 1, true), err)
    end)

    it("makes manual page and completion from the table that parses", function()
        local help, man, completion = run "--help", run "--man", run "--completion"
        local n = 0
        for option in help:gmatch "\n  (%-%-?[%a-]+)" do
            n = n + 1
            assert.is_truthy(man:find("\\fB" .. option:gsub("%-", "\\-") .. "\\fR", 1, true), option)
            assert.is_truthy(completion:find(option, 1, true), option)
        end
        assert.is_true(n >= 10)
        for _, tool in ipairs { "repl", "train", "generate", "inspect", "plan", "bench", "doctor", "plot" } do
            assert.is_truthy(help:find("\n  " .. tool .. " ", 1, true) and man:find("\\fB" .. tool .. "\\fR", 1, true))
        end
        for row in require("spec.support.shell").read("README.md"):gmatch "\n| `([A-Z_]+)` |" do
            assert.is_truthy(man:find("\\fB" .. row .. "\\fR", 1, true), row)
            assert.is_truthy(help:find("\n  " .. row .. " ", 1, true), row)
        end
        local complete = [[bash -c 'eval "$('%s' --completion)"; COMP_WORDS=(%s); COMP_CWORD=%d; _tetrain; ]]
            .. [[echo "${COMPREPLY[@]}"']]
        assert.equal("--threads\n", (shell(complete:format(TETRAIN, "tetrain --th", 1))))
        assert.equal("generate\n", (shell(complete:format(TETRAIN, "tetrain --seed 1 gener", 3))))
        assert.equal("--steps\n", (shell(complete:format(TETRAIN, TETRAIN .. " train --step", 2))))
    end)

    it("keeps what it measured in the folder that TETRAIN_CACHE names, if it names one, or in the user's", function()
        local show = (" '%s' -e 'print((require \"te.recipe.faster\".path()))'"):format(TETRAIN)
        assert.equal("/x/faster.txt\n", (shell("TETRAIN_CACHE=/x" .. show)))
        assert.equal("/y/tetrain/faster.txt\n", (shell("TETRAIN_CACHE= XDG_CACHE_HOME=/y" .. show)))
        assert.equal("/z/.cache/tetrain/faster.txt\n", (shell("TETRAIN_CACHE= XDG_CACHE_HOME= HOME=/z" .. show)))
        assert.equal("nil\n", (shell("TETRAIN_CACHE= XDG_CACHE_HOME= HOME=" .. show)))
    end)

    it("gives a hint where the cause is known", function()
        local path = script("local te = require 'te'\nte.zeros(2)\nLinear(2, 3)")
        local _, err = run(path)
        assert.is_truthy(err:find("hint: there is te.Linear", 1, true), err)
        local folder = os.tmpname() -- of its own: the common one changes while it is listed
        os.remove(folder)
        te._core.mkdir(folder)
        path = folder .. "/model.lua"
        io.open(path, "wb"):close()
        _, err = run(folder .. "/modelx.lua")
        os.execute("rm -r " .. folder)
        assert.is_truthy(err:find("hint: did you mean " .. path, 1, true), err)
        _, err = run "trian"
        assert.is_truthy(err:find("tetrain train", 1, true), err)
    end)

    it("gives a hint where tensors stand for numbers and tables", function()
        local hint, x = require("te.tools.hint").text, te.ones(2)
        for start, fns in pairs {
            ["x:item() is the number"] = { function() return ("%.4f"):format(x) end,
                function() for _ = 1, x do end end },
            ["x:totable() is a table"] = { function() return unpack(x) end, function() for _ in ipairs(x) do end end },
            ["te.lt(x, 2), te.le"] = { function() return x < 2 end, function() return x >= 2 end },
            ["a method is called with a colon"] = { function()
                local class = { name = function(self) return self.text end }
                return class.name()
            end },
            ["Lua counts with: for i = 1, n do"] = { function() return range(3) end }, -- luacheck: ignore range
            ["#x is the length"] = { function() return len(x) end }, -- luacheck: ignore len
        } do
            for _, fn in ipairs(fns) do
                local ok, message = pcall(fn)
                assert.is_false(ok)
                assert.equal(start, tostring(hint(message)):sub(1, #start), message)
            end
        end
        assert.is_nil(hint "attempt to call global 'foo' (a nil value)") -- io is not near
    end)

    it("says what names of PyTorch and Transformer Engine are here", function()
        local elsewhere, hint = require "te.tools.elsewhere", require "te.tools.hint"
        local libraries = { te, te.optim }
        for name, sentence in pairs(elsewhere.names) do
            for _, library in ipairs(libraries) do
                local ok, message = pcall(function() return library[name] end)
                assert.is_false(ok, name .. " is here, too")
                assert.equal(sentence, hint.text(message))
            end
        end
        local x, linear = te.zeros { 2, 2 }, te.Linear(2, 2)
        for name, sentence in pairs(elsewhere.methods) do
            local ok, message = pcall(function() return x[name] end)
            assert.is_false(ok, name .. " is here, too")
            assert.equal(sentence, hint.text(message))
            local code = sentence:match "^x:to%b()$"
            if code then
                local _, message = pcall(loadstring("local m = ... m:" .. name .. "()"), linear)
                assert.equal(sentence, hint.text(message))
            end
            if code and name ~= "cuda" then
                assert.equal(code:match '"(.*)"', loadstring("local x = ... x = " .. code
                    .. " return x['" .. (name == "cpu" and "device" or "dtype") .. "']")(x))
            end
        end
        local _, err = run(script "local te = require 'te'\nte.TransformerLayer(2, 2, 2)")
        assert.is_truthy(err:find("hint: build it of te.Residual", 1, true), err)
    end)

    it("ends with 1 when a script fails, with a traceback of Lua functions", function()
        local _, err, status = run(script(
            "local function f() error('oops') end\nlocal function g() f() return 1 end\ng()"))
        assert.equal(1, status)
        assert.is_truthy(err:find("^tetrain: [^\n]*%.lua:1: oops\nstack traceback:"))
        assert.is_truthy(err:find("in function 'g'", 1, true))
        assert.is_nil(err:find("[C]", 1, true))
        _, err, status = run("/no/such/script.lua")
        assert.equal(1, status)
        assert.is_truthy(err:find("/no/such/script.lua", 1, true))
        _, _, status = run(script("local x = = 1"))
        assert.equal(1, status)
        _, err = run [[-e 'error(setmetatable({}, {__tostring = function() return "odd" end}))']]
        assert.equal("tetrain: odd\nstack traceback:\n\t(command line):1: in main chunk\n", err)
        _, err, status = run [[-e 'error()']]
        assert.equal("", err)
        assert.equal(1, status)
    end)

    it("shows where an error inside a scope came from", function()
        local _, err = run(script("local te = require 'te'\nlocal function deep() error('low') end\n"
            .. "te.no_grad(function() deep() return 1 end)"))
        assert.is_truthy(err:find("in function 'deep'", 1, true))
    end)

    it("ends with what the script passes to os.exit", function()
        for code = 0, 255, 51 do
            local _, _, status = run(("-e 'os.exit(%d)'"):format(code))
            assert.equal(code, status)
        end
        local out = run [[-e 'io.write("written"); os.exit(3)']]
        assert.equal("written", out)
    end)

    it("passes device, threads and seed on", function()
        assert.equal("1\n", (run [[--threads 1 -e 'print(require("te").get_num_threads())']]))
        local command = ([[OMP_NUM_THREADS=5 '%s' %%s -e 'print(require("te").get_num_threads())']]):format(TETRAIN)
        assert.equal("5\n", (shell(command:format "")))
        assert.equal("3\n", (shell(command:format "--threads=3")))
        local a = run [[--seed 5 -e 'print(require("te").rand(3))']]
        assert.equal(a, (run [[--seed=5 -e 'print(require("te").rand(3))']]))
        assert.are_not.equal(a, (run [[--seed=6 -e 'print(require("te").rand(3))']]))
        for _, device in ipairs { "cuda:99", "foo" } do
            local out, err, status = run(("--device=%s -e 'print(1)'"):format(device))
            assert.equal(2, status)
            assert.equal("", out)
            assert.is_truthy(err:find(('tetrain: device "%s": no such device; known are'):format(device), 1, true), err)
        end
        assert.equal("cpu\n", (run [[--device cpu -e 'print(require("te").ones(1).device)']]))
    end)

    it("refuses a TE_DEVICE that names none", function()
        local _, err, status = shell(("TE_DEVICE=foo '%s' -e 'print(1)'"):format(TETRAIN))
        assert.equal(2, status)
        assert.is_truthy(err:find("tetrain: TE_DEVICE=foo: expected cpu, cuda or cuda:N", 1, true), err)
        for _, device in ipairs { "", "cpu", "cuda:1" } do
            assert.equal("1\n", (shell(("TE_DEVICE=%s '%s' -e 'print(1)'"):format(device, TETRAIN))))
        end
    end)

    it("has its threads on processors of their own where OpenMP binds threads", function()
        local path = script [[
            local te = require "te"
            te.randn(1000, 1000):relu()
            print(te.get_num_threads())
            io.stdout:flush()
            os.execute("cat /proc/" .. io.open("/proc/self/stat"):read("*n") .. "/task/*/status")]]
        local free = assert(tonumber((run(path):match "^%d+")))
        local bound = shell(("OMP_PROC_BIND=true '%s' %s"):format(TETRAIN, path))
        assert.equal(free, tonumber(bound:match "^%d+"))
        local lists, distinct = {}, 0
        for list in bound:gmatch "Cpus_allowed_list:%s*(%S+)" do
            if not lists[list] then distinct = distinct + 1 end
            lists[list] = true
        end
        local has_openmp = bound:match "Cpus_allowed_list:%s*(%S+)":match "^%d+$"
        assert.equal(has_openmp and free or 1, distinct)
    end)

    it("finds its own scripts by name", function()
        if not te._core.stat(TETRAIN:match("^(.*)/") .. "/../scripts/train_gpt.lua") then
            pending("the executable does not stand beside its scripts")
        end
        local out, _, status = run "train_gpt.lua --help"
        assert.equal(0, status)
        assert.is_truthy(out:find("--preset", 1, true))
        _, _, status = shell(("executable=$(readlink -f '%s'); cd / && \"$executable\" examples/custom_operation.lua")
            :format(TETRAIN))
        assert.equal(0, status)
    end)

    it("says what is nearest to a script that is not there", function()
        for word, sentence in pairs { help = "tetrain --help", version = "tetrain --version",
            ["trian_gpt.lua"] = "there is a script called train_gpt.lua: tetrain train_gpt.lua",
            trian = "there is a tool called train: tetrain train" } do
            local _, err, status = run(word)
            assert.equal(1, status)
            assert.is_truthy(err:find("\nhint: " .. sentence .. "\n", 1, true), err)
        end
    end)

    it("takes no bytecode", function()
        local out = run [[-e 'print(load(string.dump(function() end))) print(loadstring(string.dump(function() end)))']]
        assert.equal(2, select(2, out:gsub("attempt to load chunk with wrong mode", "")))
        local path = script(string.dump(function() end))
        local _, err, status = run(path)
        assert.equal(1, status)
        assert.equal(("tetrain: %s: bytecode is not accepted\n"):format(path), err)
    end)

    -- Runs a script in the background and signals it once it has called ready(...): a signal that comes earlier is
    -- lost, as a shell lets its background ignore INT. Nothing stands between, for what passes signals on, such as
    -- timeout(1), loses one that comes before it knows whom it has started. SIGHUP may be ignored, as by nohup(1).
    local function run_and_signal(text, signal)
        local ready = os.tmpname()
        os.remove(ready)
        local path = script("local te = require 'te'\nlocal function ready(name) io.open(name, 'wb'):close() end\n"
            .. text)
        local out, err, status = shell(("env --default-signal=HUP '%s' %s %s & pid=$!; "
            .. "while [ ! -e %s ] && kill -0 $pid; do sleep 0.05; done; kill -%s $pid; wait $pid")
            :format(TETRAIN, path, ready, ready, signal))
        os.remove(ready)
        return out, err, status
    end

    it("is interrupted by a signal", function()
        local _, err, status = run_and_signal("local x = te.ones(10)\nready(...)\nwhile true do x = x + 1 end", "INT")
        assert.is_truthy(err:find("interrupted", 1, true), err)
        assert.equal(130, status)
        _, err, status = run_and_signal(
            "ready(...)\nwhile true do pcall(function() while true do te.ones(3):sum() end end) end", "TERM")
        assert.is_truthy(err:find("interrupted", 1, true), err)
        assert.equal(130, status)
    end)

    it("ends at one signal in loops that the compiler made machine code of", function()
        for _, loop in ipairs { "while true do end", "repeat until false", "for i = 1, 1e300 do end",
            "pcall(function() while true do end end)" } do
            local _, err, status = run_and_signal("ready(...)\n" .. loop, "TERM")
            assert.is_truthy(err:find("interrupted; the script did not notice", 1, true), err)
            assert.equal(128 + 15, status)
        end
    end)

    it("lets a script finish that listens", function()
        local text = "te._core.interrupt_flag()\nready(...)\n"
            .. "while not te._core.interrupt_flag() do te.ones(3):sum() end\nos.exit(75)"
        for _, signal in ipairs { "TERM", "HUP", "HUP $pid; kill -HUP", -- one of the terminal and one of its shell
            "TERM $pid; kill -HUP", "HUP $pid; kill -TERM" } do -- both, of what ends a session
            local _, _, status = run_and_signal(text, signal)
            assert.equal(75, status)
        end
    end)

    it("goes on when its terminal is closed where SIGHUP is ignored", function()
        local path = script "os.execute 'kill -HUP $PPID' require('te').ones(2) print 'on'"
        assert.equal("on\n", (shell(("trap '' HUP; '%s' %s"):format(TETRAIN, path))))
        local out, err, status = shell(("env --default-signal=HUP '%s' %s"):format(TETRAIN, path))
        assert.equal("", out)
        assert.is_truthy(err:find("interrupted", 1, true), err)
        assert.equal(130, status)
    end)
end)
