-- te.einsum against its definition: a sum over all values of all letters, element by element.
local te = require "te"

-- The element at the positions that `at` gives to letters; dimensions of size 1 broadcast.
local function element(list, letters, sizes, at)
    local place = 0
    for i, letter in ipairs(letters) do place = place * sizes[i] + (sizes[i] == 1 and 0 or at[letter]) end
    return list[place + 1]
end

-- inputs: per operand its letters; extent: sizes of letters. Returns the result as a flat list.
local function definition(inputs, operands, output, extent)
    local letters, lists, found = {}, {}, {}
    for letter in pairs(extent) do letters[#letters + 1] = letter end
    for i, x in ipairs(operands) do lists[i] = x:contiguous():view(-1):totable() end
    local function walk(k, at)
        if k <= #letters then
            for value = 0, extent[letters[k]] - 1 do
                at[letters[k]] = value
                walk(k + 1, at)
            end
            return
        end
        local product, place = 1, 0
        for i, list in ipairs(lists) do product = product * element(list, inputs[i], operands[i].shape, at) end
        for _, letter in ipairs(output) do place = place * extent[letter] + at[letter] end
        found[place + 1] = (found[place + 1] or 0) + product
    end
    walk(1, {})
    return found
end

local function assert_near(expected, x)
    local list = x:contiguous():view(-1):totable()
    assert.equal(#expected, #list)
    for i, value in ipairs(expected) do assert.is_true(math.abs(value - list[i]) < 1e-9, i) end
end

describe("te.einsum", function()
    it("is the sum over the letters that the result lacks", function()
        local seed = 7
        local function random(n)
            seed = (seed * 16807) % 2147483647
            return seed % n + 1
        end
        te.manual_seed(3)
        local shared = 0
        for _ = 1, 400 do
            local inputs, operands, known, texts = {}, {}, {}, {}
            local sizes, extent = {}, {}
            for letter in ("abcde"):gmatch "." do sizes[letter] = random(4) end
            for i = 1, random(3) do
                inputs[i] = {}
                local shape = {}
                for d = 1, random(5) - 1 do
                    local letter = ("abcde"):sub(random(5)):sub(1, 1)
                    inputs[i][d] = letter
                    shape[d] = random(8) == 1 and 1 or sizes[letter]
                end
                for d, letter in ipairs(inputs[i]) do -- a diagonal is of two equal dimensions
                    for e = 1, d - 1 do
                        if inputs[i][e] == letter then shape[d] = shape[e] end
                    end
                    if extent[letter] then shared = shared + 1 else known[#known + 1] = letter end
                    extent[letter] = math.max(extent[letter] or 1, shape[d])
                end
                operands[i] = te.randn(shape, { dtype = "float64" })
                texts[i] = table.concat(inputs[i])
            end
            local output = {}
            while #known > 0 do
                local letter = table.remove(known, random(#known))
                if random(2) == 1 then output[#output + 1] = letter end
            end
            local equation = table.concat(texts, ",") .. " -> " .. table.concat(output)
            local y = te.einsum(equation, operands)
            local shape = {}
            for i, letter in ipairs(output) do shape[i] = extent[letter] end
            assert.same(shape, y.shape, equation)
            assert_near(definition(inputs, operands, output, extent), y)
        end
        assert.is_true(shared > 500)
    end)

    it("without an arrow sorts what occurs once, and broadcasts what ... stands for", function()
        local a, b = te.randn({ 2, 3 }, { dtype = "float64" }), te.randn({ 3, 4 }, { dtype = "float64" })
        assert_near(a:matmul(b):view(-1):totable(), te.einsum("ij,jk", a, b))
        assert_near(a:matmul(b):transpose(1, 2):contiguous():view(-1):totable(), te.einsum("bj,ja", a, b))
        assert.equal(15, te.einsum("ii", te.arange(1, 9):view(3, 3)):item())
        local x, y = te.randn({ 5, 1, 2, 3 }, { dtype = "float64" }), te.randn({ 4, 3, 2 }, { dtype = "float64" })
        assert.same({ 5, 4, 2, 2 }, te.einsum("...ij,...jk->...ik", x, y).shape)
        assert_near(x:matmul(y):view(-1):totable(), te.einsum("...ij,...jk", x, y))
        assert_near(x:matmul(y):permute(3, 1, 2, 4):contiguous():view(-1):totable(),
            te.einsum("...ij, ...jk -> i...k", x, y))
        assert_near(x:sum({ 1, 2 }):view(-1):totable(), te.einsum("...ij->ij", x))
    end)

    it("keeps dtypes as products do, and takes empty tensors", function()
        local a, b = te.randint(-9, 9, { 3, 4 }), te.randint(-9, 9, { 3, 4 })
        assert.equal("int64", te.einsum("ij,ij->ij", a, b).dtype)
        assert.equal((a * b):sum():item(), te.einsum("ij,ij->", a, b):item())
        assert.equal("int64", te.einsum("ij,ij->", a, b).dtype)
        local large = te.tensor({ 16777217, 1 }, { dtype = "int64" }) -- more than float32 has
        assert.equal(16777218, te.einsum("i,i->", large, te.ones({ 2 }, { dtype = "int64" })):item())
        assert.same({ { 3 } }, te.einsum("ik,kj->ij", te.ones({ 1, 3 }, { dtype = "int64" }),
            te.ones({ 3, 1 }, { dtype = "int64" })):totable())
        te.autocast({ dtype = "bfloat16" }, function()
            assert.equal(te.matmul(te.ones { 2, 2 }, te.ones { 2, 2 }).dtype,
                te.einsum("ij,jk->ik", te.ones { 2, 2 }, te.ones { 2, 2 }).dtype)
        end)
        assert.same({ 2, 3 }, te.einsum("ik,kj->ij", te.ones { 2, 0 }, te.ones { 0, 3 }).shape)
        assert.equal(0, te.einsum("ik,kj->ij", te.ones { 2, 0 }, te.ones { 0, 3 }):sum():item())
        assert.equal(0, te.einsum("ik,kj->", te.ones { 0, 2 }, te.ones { 2, 3 }):item())
    end)

    it("has the gradients of what it is made of", function()
        local function check(equation, ...)
            local inputs = {}
            for i, shape in ipairs { ... } do inputs[i] = te.randn(shape, { dtype = "float64" }) end
            assert.is_true(te.gradcheck(function(...) return te.einsum(equation, ...) end, inputs))
        end
        check("bhqd,bkhd->bqhk", { 2, 2, 3, 2 }, { 2, 3, 2, 2 })
        check("ij,jk,kl->li", { 2, 3 }, { 3, 2 }, { 2, 4 })
        check("iij->ji", { 3, 3, 2 })
        check("...i,i->...", { 2, 3, 4 }, { 4 })
        check("i,j->", { 3 }, { 2 })
    end)

    it("says what is wrong", function()
        local function wrong(message, ...)
            local arguments, n = { ... }, select("#", ...)
            assert.error_matches(function() return (te.einsum(unpack(arguments, 1, n))) end, message, 1, true)
        end
        local x, y = te.ones { 2, 3 }, te.ones { 4, 2 }
        wrong('te.einsum: operand 2: {4,2}: dimension 1 is 4, but "j" of "ij,jk" is 3 before it', "ij,jk", x, y)
        wrong('te.einsum: operand 1: {2,3} has 2 dimensions, equation "ijk" names 3', "ijk", x)
        wrong('te.einsum: operand 1: {2,3} has 2 dimensions, equation "i" names 1', "i", x)
        wrong('te.einsum: equation "ij->ii": "i" of the result is there twice', "ij->ii", x)
        wrong('te.einsum: equation "ij->z": "z" of the result is in no operand', "ij->z", x)
        wrong('te.einsum: equation "ij,j.": "." in "j.": expected letters and at most one "..."', "ij,j.", x, y)
        wrong('te.einsum: equation "ij" has 1 operands, got 2', "ij", x, y)
        wrong("te.einsum: operand 2: expected a tensor, got number 3", "ij,", x, 3)
        wrong("te.einsum: equation: expected a string, got float32 tensor {2,3}", x, x)
        wrong('te.einsum: operand 1: {2,3}: dimension 2 is 3, but "i" of "ii" is 2 before it', "ii", x)
    end)
end)
