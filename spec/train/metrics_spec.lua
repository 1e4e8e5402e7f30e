local te = require "te"
local shell = require "spec.support.shell"

local TETRAIN = os.getenv("TETRAIN") or te._core.executable()

describe("te.train.Metrics", function()
    local path
    before_each(function() path = os.tmpname() end)
    after_each(function() os.remove(path) end)

    local function lines()
        local list = {}
        for line in io.lines(path) do list[#list + 1] = line end
        return list
    end

    it("writes one object a step, in order", function()
        local m = te.train.Metrics.open(path, 0)
        m:write { "step", 1, "loss", 2.5, "lr", 1e-3 }
        m:write { "step", 2, "loss", 0 / 0, "skipped", true, "note", 'a"b' }
        m:close()
        assert.same({ '{"step":1,"loss":2.5,"lr":0.001}',
            [[{"step":2,"loss":null,"skipped":true,"note":"a\u0022b"}]] }, lines())
    end)

    it("drops what came after the checkpoint that a run goes on from", function()
        local m = te.train.Metrics.open(path, 0)
        for step = 1, 5 do m:write { "step", step } end
        m:close()
        local file = io.open(path, "a")
        file:write('{"step":2,"lo')
        file:close()
        m = te.train.Metrics.open(path, 3)
        m:write { "step", 4, "loss", 1 }
        m:close()
        assert.same({ '{"step":1}', '{"step":2}', '{"step":3}', '{"step":4,"loss":1}' }, lines())
    end)

    it("adds to the object of a step", function()
        local m = te.train.Metrics.open(path, 0)
        for step = 1, 3 do m:write { "step", step, "loss", step } end
        m:write { "step", 2, "product", "x" }
        m:add(2, { "val_loss", 0.5 })
        m:add(3, {})
        m:write { "step", 4, "loss", 4 }
        m:close()
        assert.same({ '{"step":1,"loss":1}', '{"step":2,"loss":2,"val_loss":0.5}', '{"step":3,"loss":3}',
            '{"step":2,"product":"x"}', '{"step":4,"loss":4}' }, lines())
    end)

    it("has a field once that is added again", function()
        local m = te.train.Metrics.open(path, 0)
        m:write { "step", 1, "loss", 1, "lr", 2 }
        m:add(1, { "val_loss", 0.5 })
        m:close()
        m = te.train.Metrics.open(path, 1) -- of a run that added it and was killed before it saved
        m:add(1, { "val_loss", 0.25 })
        m:close()
        assert.same({ '{"step":1,"loss":1,"lr":2,"val_loss":0.25}' }, lines())
    end)

    it("leaves what is there when the disk is full", function()
        local m = te.train.Metrics.open(path, 0)
        for step = 1, 5 do m:write { "step", step } end
        m:close()
        local output, status = shell.capture(([[(ulimit -f 0; %s -e "te.train.Metrics.open('%s', 3)")]])
            :format(TETRAIN, path))
        assert.equal(1, status)
        assert.matches(path .. ": offset 0: cannot write: File too large", output, 1, true)
        assert.equal(5, #lines())
        for _, name in ipairs(te._core.list_dir(path:match "^(.*)/")) do
            assert.is_falsy(name:find(path:match "[^/]*$", 1, true) and name:find "%.tmp$", name)
        end
    end)

    it("raises when the file cannot be written", function()
        assert.error_matches(function() te.train.Metrics.open("/nowhere/m.jsonl", 0) end, "/nowhere/m%.jsonl")
    end)
end)
