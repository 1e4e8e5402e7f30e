--- The prompt: piped, and on a terminal that script(1) makes.

local te = require "te"
local shell = require "spec.support.shell"

local TETRAIN = os.getenv("TETRAIN") or te._core.executable()

local function read(path)
    local file = io.open(path, "rb")
    local text = file and file:read "*a" or ""
    if file then file:close() end
    return text
end

-- Output and errors of the prompt reading `input` from a pipe.
local function piped(input)
    local source, out, err = os.tmpname(), os.tmpname(), os.tmpname()
    local file = io.open(source, "wb")
    file:write(input)
    file:close()
    local status = os.execute(("'%s' -i <%s >%s 2>%s"):format(TETRAIN, source, out, err))
    local text, problems = read(out), read(err)
    for _, path in ipairs { source, out, err } do os.remove(path) end
    return text, problems, status
end

describe("the prompt, piped", function()
    it("says nothing of an interrupt that comes when the values are shown", function()
        local late = "old = print; print = function(...) old(...); error('interrupted', 0) end\n7 + 1\nprint = old\n"
        local text, problems = piped(late .. "error('interrupted', 0)\n")
        assert.equal("8\n", text)
        assert.equal("interrupted\n", problems)
    end)

    it("prints values without return, prompt or echo", function()
        assert.equal("2\n", (piped "1 + 1\n"))
        assert.equal('"a"\t{1, 2, k = true}\n', (piped "'a', {1, 2, k = true}\n"))
        assert.equal("float32 tensor {2}\n{0, 0}\n", (piped "te.zeros(2)\n"))
        assert.equal("", (piped "x = 5\n"))
        assert.equal("nil\n", (piped "nil\n"))
        assert.equal(("te %s; ?te lists what is in it\n"):format(te.version), (piped "te\n"))
        assert.equal("3\n", (piped "= 1 + 2\n"))
        assert.equal("", (piped "(function() end)()\n"))
    end)

    it("says in which line a missing field was read", function()
        for _, text in ipairs { "x.y.z\n", "x.y.z  \n", "x = 1; x.y.z\n" } do
            local _, err = piped("x = {}\n" .. text)
            assert.equal(1, (err:find("prompt:1: attempt to index", 1, true)), text .. err)
        end
        local _, err = piped "x = {}\n{1,\nx.y.z}\n"
        assert.equal(1, (err:find("prompt:2: attempt to index", 1, true)), err)
        assert.equal("3\n4\n", (piped "x = 3\nx -- a comment\nx + 1 --[[ of\ntwo lines]]\n"))
    end)

    it("keeps the last value in _", function()
        assert.equal("3\n4\n", (piped "1 + 2\n_ + 1\n"))
    end)

    it("takes more lines only when the chunk is incomplete", function()
        assert.equal("5\n10\n", (piped "x = 5\nfor i = 1, 2 do\nprint(i * x)\nend\n"))
        assert.equal("{1, 2}\n", (piped "{1,\n2\n}\n"))
        assert.equal("3\n", (piped "1 +\n2\n"))
        assert.equal('"a\\nb"\n', (piped "[[a\nb]]\n"))
        local out, err = piped "x = )\n7\n"
        assert.equal("7\n", out)
        assert.is_truthy(err:find("prompt:1: unexpected symbol near ')'", 1, true))
        _, err = piped "x = {\n"
        assert.is_truthy(err:find("near '<eof>'", 1, true))
    end)

    it("writes tables inside tables with two spaces each", function()
        local long = ("x"):rep(99)
        assert.equal(('{\n  a = {\n    {\n      "%s"\n    },\n    2\n  }\n}\n'):format(long),
            (piped "{ a = { { ('x'):rep(99) }, 2 } }\n"))
        assert.equal("{\n  float32 tensor {2}\n  {1, 1}\n}\n", (piped "{ te.ones(2) }\n"))
    end)

    it("goes on after an error, shown without its own frames", function()
        local out, err = piped "function f() error('oops') end\nlocal y = f()\n1\nf(\n)\n"
        assert.equal("1\n", out)
        assert.is_truthy(err:find("prompt:1: oops\nstack traceback:\n\tprompt:1: in function 'f'", 1, true), err)
        assert.is_nil(err:find("te/tools", 1, true))
        _, err = piped "error('plain')\n"
        assert.equal("prompt:1: plain\n", err)
        _, err = piped "te.matmul(te.ones { 4, 3 }, te.ones { 5, 2 })\n"
        assert.equal("prompt:1: te.matmul: inner sizes differ: {4,3} x {5,2}\n", err)
        assert.matches(":quit leaves", (piped "exit\n"))
        assert.matches(":time EXPRESSION", (piped "help\n"))
        _, err = piped "nil + 1\n"
        assert.equal("prompt:1: attempt to perform arithmetic on a nil value\n", err)
    end)

    it("explains names and values", function()
        assert.is_truthy((piped "?softmax\n"):find("^te%.softmax%(x, dim: dim = %-1%)\n%S"))
        assert.is_truthy((piped "? te.no_grad\n"):find("^te%.no_grad%(fn, %.%.%.%)\nRuns fn"))
        assert.is_truthy((piped "?Linear\n"):find("^te%.Linear%(in_features, out_features, opts%)\n%S"))
        assert.is_truthy((piped "?optim.SGD\n"):find("^te%.optim%.SGD%(params, opts%)\n.-\n  momentum %(number"))
        assert.is_truthy((piped "help(te.zeros)\n"):find("^te%.zeros%(shape, opts%)\nA tensor of zeros"))
        assert.is_truthy((piped "help(te.ones(2))\n"):find("^float32 tensor {2}\nMethods: "))
        assert.is_truthy((piped "help()\n"):find("softmax", 1, true))
        local out = piped "help(te.Linear(2, 3))\n"
        assert.is_truthy(out:find("an instance of Linear", 1, true), out)
        local _, err = piped "?sofmax\n"
        assert.is_truthy(err:find("did you mean softmax?", 1, true), err)
    end)

    it("has commands", function()
        assert.is_truthy((piped ":time 1 + 1\n"):find("^2\n[%d.]+ %a+\n$"))
        assert.is_truthy((piped ":mem\n"):find("^tensors [%d.]+ MB"))
        assert.is_truthy((piped ":help\n"):find(":plan", 1, true))
        assert.equal("1\n", (piped "1\n:quit\n2\n"))
        local _, err = piped ":tmie 1\n"
        assert.is_truthy(err:find(":tmie is no command, did you mean :time?", 1, true), err)
        _, err = piped ":plan te.zeros(2)\n"
        assert.is_truthy(err:find("expected a model, got a tensor", 1, true), err)
    end)

    it("shows the expression that a chunk ends in", function()
        assert.equal("3\n", (piped "local a = 1; a + 2\n"))
        assert.equal("3\n", (piped "local a = 1; (function() return a + 2 end)()\n"))
        assert.equal("1\n2\n", (piped "for i = 1, 2 do\nprint(i);\nend\n"))
        assert.equal("", (piped "x = 5;\n"))
        assert.equal("5\n", (piped "x = 5; x -- five\n"))
    end)

    it("takes long lines and no final newline", function()
        assert.equal("100000\n", (piped("#'" .. ("x"):rep(100000) .. "'")))
    end)
end)

describe("completion", function()
    local complete = require "te.tools.complete"

    before_each(function() _G.te = te end) -- as at the prompt

    local function names(before)
        local found = {}
        for _, name in ipairs((complete.candidates(before))) do found[name] = true end
        return found
    end

    it("knows globals, fields, methods and keywords", function()
        assert.is_true(names "coro".coroutine)
        assert.is_true(names "wh"["while"])
        assert.is_true(names "te.soft".softmax)
        assert.is_true(names "te.Lin".Linear)
        assert.is_true(names "y = te.optim.Ad".AdamW)
        _G.completion_case = { x = te.zeros(2), list = { { deep = 1 } }, name = "s" }
        assert.is_true(names "completion_case.list[1].de".deep)
        assert.is_true(names "completion_case.x:su".sum)
        assert.is_true(names "completion_case.x.dt".dtype)
        assert.is_true(names "completion_case.name:up".upper)
        assert.is_nil(next(names "completion_case.x:dtyp"))
        assert.is_nil(next(names "completion_case.none.x"))
        _G.completion_case = te.Linear(2, 2)
        assert.is_true(names "completion_case:param".parameters)
        assert.is_true(names "completion_case.wei".weight)
        _G.completion_case = te.Sequential(te.ReLU())
        assert.is_true(names "completion_case:app".append)
        assert.is_true(names "completion_case:param".parameters)
        _G.completion_case = nil
    end)

    it("knows files inside a string", function()
        local folder = os.tmpname()
        os.remove(folder)
        te._core.mkdir(folder .. "/data")
        io.open(folder .. "/model.safetensors", "w"):close()
        assert.is_true(names("te.load('" .. folder .. "/mod")["model.safetensors"])
        assert.is_true(names('te.load("' .. folder .. "/")["data/"])
        os.execute("rm -r " .. folder)
    end)

    it("calls nothing of the user's", function()
        local called = false
        _G.completion_case = setmetatable({}, { __index = function() called = true end })
        names "completion_case.a.b"
        assert.is_false(called)
        _G.completion_case = nil
    end)

    it("inserts what is certain and shows what is not", function()
        assert.are.same({ "ax" }, { complete.complete "te.softm" })
        local insert, show = complete.complete "te.log"
        assert.equal("", insert)
        assert.is_truthy(show:find("log_softmax", 1, true))
        assert.equal("", (complete.complete "no_such_name_anywhere"))
    end)
end)

describe("the prompt on a terminal", function()
    local folder, keys, screen

    local function wait_for(text, from)
        local deadline = te._core.clock() + 60
        while te._core.clock() < deadline do
            if read(screen):find(text, from or 1, true) then return true end
            te._core.sleep(0.01)
        end
        error(("%q did not come; the terminal shows\n%s"):format(text, read(screen)), 2)
    end

    -- Waits until the prompt stands again behind `text`: what is typed before goes to the terminal as it is between
    -- two lines, where Ctrl-D is no end.
    local function wait_for_prompt_after(text, from)
        wait_for(text, from)
        wait_for("\27[?2004h> ", select(2, read(screen):find(text, from or 1, true)))
    end

    -- How much is on the terminal, when nothing has come for a while.
    local function settled()
        local shown, quiet = -1, 0
        while quiet < 20 do
            te._core.sleep(0.01)
            local now = #read(screen)
            shown, quiet = now, now == shown and quiet + 1 or 0
        end
        return shown
    end

    -- Starts the prompt; the function returned types text.
    local function start()
        screen = folder .. "/screen"
        os.execute(("rm -f %s/keys %s; mkfifo %s/keys"):format(folder, screen, folder))
        os.execute(([[TERM=xterm TETRAIN_HISTORY=%s/history script -qfec "'%s'; echo status \$?" %s ]]
            .. [[<%s/keys >/dev/null 2>&1 &]]):format(folder, TETRAIN, screen, folder))
        keys = assert(io.open(folder .. "/keys", "w"))
        keys:setvbuf "no"
        wait_for "> "
        return function(text) keys:write(text) end
    end

    before_each(function()
        folder = os.tmpname()
        os.remove(folder)
        te._core.mkdir(folder)
        if os.execute "command -v script >/dev/null" ~= 0 then pending "there is no script(1)" end
    end)

    after_each(function()
        if keys then keys:close() end
        keys = nil
        os.execute("rm -rf " .. folder)
    end)

    local function finish(type_text)
        type_text "\4"
        wait_for "status 0"
    end

    it("stops a loop, a loop under pcall, a loop of operations and one long operation at Ctrl-C, and goes on",
        function()
        local type_text = start()
        for i, loop in ipairs { "while true do end", "while true do pcall(function() while true do end end) end",
            "x = te.ones(200, 200) while true do te.matmul(x, x) end", "te._core.sleep(1000)",
            "x = te.ones(1, 2048, 2048):expand(128, 2048, 2048) te.matmul(x, x)" } do
            type_text(("print('begin' .. %d) %s\r"):format(i, loop))
            wait_for("begin" .. i .. "\r\n")
            local shown = #read(screen)
            type_text "\3"
            wait_for("interrupted", shown)
            type_text(("'after' .. %d\r"):format(i))
            wait_for_prompt_after(('"after%d"'):format(i))
        end
        finish(type_text)
    end)

    it("drops the line at Ctrl-C and ends at the second one", function()
        local type_text = start()
        type_text "garbage("
        wait_for "garbage("
        type_text "\3"
        type_text "'an' .. 'swer'\r"
        wait_for_prompt_after '"answer"' -- nothing that the first line may have in its date
        type_text "\3"
        wait_for "(Ctrl-C again or Ctrl-D ends)"
        local shown = #read(screen)
        type_text "x"
        wait_for("x", shown)
        type_text "\3" -- only clears the line
        wait_for("\n\27[?2004h> ", shown)
        type_text "\3"
        wait_for("(Ctrl-C again", shown)
        type_text "\3"
        wait_for "status 130"
    end)

    it("leaves the rows of a long input above the next prompt", function()
        local type_text = start()
        type_text(("x"):rep(200) .. "\1") -- three rows, and the cursor in the first one
        wait_for(("x"):rep(40))
        local before = settled()
        type_text "\5\1y"
        wait_for("y", before + 1)
        local shown = settled()
        type_text "\3"
        wait_for("\27[?2004h> ", shown)
        local downwards = select(2, read(screen):sub(shown + 1):gsub("\n", ""))
        assert.equal(3, downwards)
        finish(type_text)
    end)

    it("loses no line to a Ctrl-C that comes as the one before ends", function()
        local type_text = start()
        for i = 1, 20 do
            type_text(("'late' .. %d\r"):format(i))
            wait_for(('"late%d"'):format(i))
            type_text "\3"
        end
        type_text "te.ones(2) + 0\r"
        wait_for_prompt_after "{1, 1}"
        assert.is_nil(read(screen):find("interrupted", 1, true))
        finish(type_text)
    end)

    it("runs a pasted block at once, tabs and locals included", function()
        local type_text = start()
        local block = { "local total = 0", "for i = 1, 48 do" }
        for i = 1, 46 do block[#block + 1] = "\ttotal = total + " .. i end
        block[#block + 1] = "end"
        block[#block + 1] = "print('sum is ' .. total)"
        type_text("\27[200~" .. table.concat(block, "\n") .. "\n\27[201~")
        wait_for("sum is " .. 48 * 46 * 47 / 2)
        type_text("\27[200~'pasted' ..\n' without a newline'\27[201~")
        wait_for "newline"
        type_text "\r"
        wait_for '"pasted without a newline"'
        local blocks = {
            { "local a = 20\nlocal b = 3\na + b\n", 23 }, { "local t = {\n4 }\n\nt[1] +\n20 -- more\n\n", 24 },
            { "local function f(x)\n\treturn x + 5\nend\nf(\n20)\n", 25 }, { "y = 13 * 2\ny", 26 },
        }
        for _, block in ipairs(blocks) do
            local shown = #read(screen)
            type_text("\27[200~" .. block[1] .. "\27[201~" .. (block[1]:sub(-1) == "\n" and "" or "\r"))
            wait_for_prompt_after(block[2] .. "\r\n", shown)
        end
        finish(type_text)
    end)

    it("completes, and remembers lines from one start to the next", function()
        local type_text = start()
        type_text "te.softm\t({1}) --\r"
        wait_for "te.softmax"
        type_text "'remember ' .. 'me'\r"
        wait_for_prompt_after '"remember me"'
        finish(type_text)
        keys:close()
        type_text = start()
        type_text "\27[A\r"
        wait_for_prompt_after '"remember me"'
        finish(type_text)
        assert.is_truthy(read(folder .. "/history"):find("remember", 1, true))
    end)

    it("adds to what another prompt has remembered meanwhile", function()
        local type_text = start()
        local file = io.open(folder .. "/history", "a")
        file:write "_HiStOrY_V2_\n'of'\\040..\\040'\\134another'\n"
        file:close()
        type_text "'of ' .. '\\\\one'\r"
        wait_for_prompt_after '"of \\\\one"'
        finish(type_text)
        assert.equal("_HiStOrY_V2_\n'of'\\040..\\040'\\134another'\n'of\\040'\\040..\\040'\\134\\134one'\n",
            read(folder .. "/history"))
        keys:close()
        type_text = start()
        type_text "\27[A\r"
        wait_for_prompt_after '"of \\\\one"'
        finish(type_text)
    end)

    it("takes the terminal back when it goes on after a stop", function()
        local type_text = start()
        type_text "io.open('/proc/self/stat'):read '*n'\r"
        wait_for_prompt_after "'*n'\r\n"
        local pid = read(screen):match "%*n'\r\n.-(%d+)\r\n"
        type_text "12"
        wait_for "12"
        local terminal = ("-F $(readlink /proc/%s/fd/0)"):format(pid)
        os.execute(("stty sane %s"):format(terminal))
        local shown = #read(screen)
        os.execute("kill -CONT " .. pid)
        wait_for("\27[?2004h", shown)
        wait_for("12", shown)
        assert.is_truthy(shell.capture("stty -a " .. terminal):find("-icanon", 1, true))
        shown = #read(screen)
        type_text "34\r"
        wait_for("1234\r\n", shown)
        assert.equal(1, select(2, read(screen):sub(shown + 1):gsub("1234\r\n", "")))
        finish(type_text)
    end)
end)
