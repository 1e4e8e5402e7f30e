--- te.load: parts of files, and dtypes that tensors do not have. Files are written here byte by byte.

local te = require "te"

local path

local function little(n, bytes)
    local text = {}
    for i = 1, bytes do
        text[i] = string.char(n % 256)
        n = math.floor(n / 256)
    end
    return table.concat(text)
end

-- A file of { name, dtype, shape as text, data }.
local function write(tensors)
    local entries, data, at = {}, {}, 0
    for i, t in ipairs(tensors) do
        entries[i] = ('"%s":{"dtype":"%s","shape":%s,"data_offsets":[%d,%d]}'):format(t[1], t[2], t[3], at, at + #t[4])
        data[i], at = t[4], at + #t[4]
    end
    local json = "{" .. table.concat(entries, ",") .. ',"__metadata__":{"note":"x"}}'
    local file = assert(io.open(path, "wb"))
    file:write(little(#json, 8), json, table.concat(data))
    file:close()
end

local FOREIGN = {
    { "a.i8", "I8", "[2,2]", "\128\127\255\0" },
    { "a.i16", "I16", "[3]", little(32768, 2) .. little(65535, 2) .. little(32767, 2) },
    { "a.u16", "U16", "[2]", little(65535, 2) .. little(7, 2) },
    { "b.u32", "U32", "[2,1]", little(2 ^ 32 - 1, 4) .. little(258, 4) },
    { "b.u8", "U8", "[1]", "\200" },
    { "c.scale", "F8_E8M0", "[3]", "abc" },
    { "c.packed", "F4", "[2,4]", "abcd" },
    { "c.empty", "I16", "[0,3]", "" },
}

describe("te.load", function()
    before_each(function() path = os.tmpname() end)
    after_each(function() os.remove(path) end)

    it("makes wider numbers of those that tensors do not have", function()
        write(FOREIGN)
        local tensors, metadata, names = te.load(path, { names = "^[ab]%." })
        assert.same({ "a.i8", "a.i16", "a.u16", "b.u32", "b.u8" }, names)
        assert.equal("x", metadata.note)
        for name, expected in pairs {
            ["a.i8"] = { "int32", { { -128, 127 }, { -1, 0 } } }, ["a.i16"] = { "int32", { -32768, -1, 32767 } },
            ["a.u16"] = { "int32", { 65535, 7 } }, ["b.u32"] = { "int64", { { 2 ^ 32 - 1 }, { 258 } } },
            ["b.u8"] = { "uint8", { 200 } },
        } do
            assert.equal(expected[1], tensors[name].dtype)
            assert.same(expected[2], tensors[name]:totable())
        end
        assert.same({ 0, 3 }, te.load(path, { names = { "c.empty" } })["c.empty"].shape)
    end)

    it("minds a dtype that it cannot read where it is wanted alone", function()
        write(FOREIGN)
        for name, dtype in pairs { ["c.scale"] = "F8_E8M0", ["c.packed"] = "F4" } do
            assert.error_matches(function() te.load(path, { names = { "b.u8", name } }) end,
                ('tensor "%s": dtype "%s" is not one of F32'):format(name, dtype), 1, true)
        end
        assert.error_matches(function() te.load(path) end, 'tensor "c.scale": dtype', 1, true)
        assert.same({ 200 }, te.load(path, { names = { "b.u8" } })["b.u8"]:totable())
    end)

    it("reads only what a list, a pattern or a function names", function()
        te.save(path, { w = te.ones { 2 }, ["x.w"] = te.zeros { 3 }, b = te.full({ 1 }, 5) })
        local function names(wanted)
            local tensors, _, order = te.load(path, { names = wanted })
            local n = 0
            for _ in pairs(tensors) do n = n + 1 end
            assert.equal(n, #order)
            table.sort(order)
            return table.concat(order, " ")
        end
        assert.equal("b w x.w", names(nil))
        assert.equal("b x.w", names { "x.w", "b" })
        assert.equal("", names {})
        assert.equal("w x.w", names "w$")
        assert.equal("x.w", names "^x%.")
        local asked = {}
        assert.equal("b", names(function(name)
            asked[#asked + 1] = name
            return name == "b"
        end))
        table.sort(asked)
        assert.same({ "b", "w", "x.w" }, asked)
        assert.same({ 5 }, te.load(path, { names = { "b" } }).b:totable())
        -- what is not wanted is not read
        local before = te.memory_stats().current
        te.save(path, { large = te.zeros { 1000, 1000 }, small = te.ones { 1 } })
        collectgarbage()
        te.reset_peak_memory()
        local now = te.memory_stats().current
        te.load(path, { names = { "small" } })
        assert.is_true(te.memory_stats().peak - now < 1e5, before)
    end)

    it("reads parts of nested tables by their names in the file", function()
        te.save(path, { state = { { m = te.ones { 2 }, n = te.zeros { 2 } } }, lr = 0.5 })
        local tables = te.load(path, { names = "/m$" })
        assert.same({ 1, 1 }, tables.state[1].m:totable())
        assert.is_nil(tables.state[1].n)
        assert.equal(0.5, tables.lr)
    end)

    it("says what is wrong", function()
        te.save(path, { weight = te.ones { 2 } })
        for message, names in pairs {
            [('has no tensor "wieght"; did you mean "weight"?')] = { "wieght" },
            [('te.load: names: ' .. path .. ' has no tensor "q"')] = { "weight", "q" },
            ["te.load: names: entry 2: expected a string, got 5"] = { "weight", 5 },
            ["te.load: names: a list has no entry"] = { weight = true },
            ["te.load: names: expected a list, a pattern or a function, got 5"] = 5,
            ["te.load: names: expected a list, a pattern or a function, got a table"] =
                setmetatable({}, { __call = function() return true end }),
            ['te.load: names: "[": malformed pattern'] = "[",
            ['te.load: names: "w(e": unfinished capture'] = "w(e",
            ["stop here"] = function() error "stop here" end,
        } do
            assert.error_matches(function() te.load(path, { names = names }) end, message, 1, true)
        end
        assert.error_matches(function() te.load(path, { name = "w" }) end, 'te.load: unknown option "name"', 1, true)
        assert.error_matches(function() te.load(path, { "weight" }) end, "te.load: unknown option 1", 1, true)
        assert.error_matches(function() te.load(path, {}, 3) end, "te.load: argument 3, number 3, is too much", 1, true)
        assert.same({ 1, 1 }, te.load(path).weight:totable())
    end)

    it("takes a path as a whole, however long", function()
        local folder = path .. "-folder"
        assert(os.execute("mkdir " .. folder))
        local long = folder .. ("/."):rep((4095 - #folder - #"/weight") / 2)
        long = long .. ("/"):rep(4095 - #long - #"weight") .. "weight"
        te.save(folder .. "/weight", { inside = te.ones { 1 } })
        assert.equal(4095, #long)
        assert.is_truthy(te.load(long).inside)
        assert.error_matches(function() te.load(long .. "-of-another") end, "File name too long")
        os.execute("rm -r " .. folder)
    end)
end)
