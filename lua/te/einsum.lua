--- te.einsum: products and sums of tensors by the letters of their dimensions.
--
-- Operands are taken into the result from left to right. Of two, letters of one alone that nothing reads afterwards are
-- summed first. Letters that both have and nothing reads afterwards are then the inner dimension of a batched
-- te.matmul; where there are none, the operands are multiplied element by element.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"

local function wrong(message, ...) fail("te.einsum: " .. message, ...) end

-- "ab..." as a list of letters; "..." is one entry.
local function letters_of(text, whole)
    local list, dots, at = {}, 0, 1
    while at <= #text do
        local letter = text:sub(at, at + 2) == "..." and "..." or text:sub(at, at)
        if letter == "..." then dots = dots + 1 end
        if not letter:find("^%a$") and letter ~= "..." or dots > 1 then
            wrong("equation %q: %q in %q: expected letters and at most one \"...\"", whole, letter, text)
        end
        list[#list + 1] = letter
        at = at + #letter
    end
    return list
end

local function set_of(list)
    local set = {}
    for _, letter in ipairs(list) do set[letter] = (set[letter] or 0) + 1 end
    return set
end

-- Dimensions that "..." stands for have the letters "-1", "-2", … from the last one, so that operands align.
local function expand(list, n)
    local found = {}
    for _, letter in ipairs(list) do
        if letter ~= "..." then found[#found + 1] = letter end
        for i = letter == "..." and n or 0, 1, -1 do found[#found + 1] = "-" .. i end
    end
    return found
end

-- Without "->": what "..." stands for, then letters that occur once, in the order of the alphabet.
local function implied(inputs, n)
    local counts, once = {}, {}
    for _, list in ipairs(inputs) do
        for letter, count in pairs(set_of(list)) do counts[letter] = (counts[letter] or 0) + count end
    end
    for letter, count in pairs(counts) do
        if count == 1 and letter:find("%a") then once[#once + 1] = letter end
    end
    table.sort(once)
    return expand({ "...", unpack(once) }, n)
end

-- x with the dimensions in the order of `list`, those it lacks of size 1.
local function arranged(x, letters, list)
    local at, order, missing = {}, {}, {}
    for i, letter in ipairs(letters) do at[letter] = i end
    for i, letter in ipairs(list) do
        if at[letter] then order[#order + 1] = at[letter] else missing[#missing + 1] = i end
    end
    x = #order > 1 and x:permute(order) or x
    for _, i in ipairs(missing) do x = x:unsqueeze(i) end
    return x
end

-- A letter twice in one operand: its diagonal.
local function diagonal(x, letters)
    for i = #letters, 2, -1 do
        for j = 1, i - 1 do
            if letters[i] == letters[j] then
                local n = x:size(i)
                local rest = { unpack(letters) }
                table.remove(rest, i)
                table.remove(rest, j)
                local order = {}
                for d = 1, #letters do
                    if d ~= i and d ~= j then order[#order + 1] = d end
                end
                local shape = {}
                for k, d in ipairs(order) do shape[k] = x:size(d) end
                order[#order + 1], order[#order + 2] = j, i
                shape[#shape + 1] = n * n
                local places = te.arange(0, n - 1, { dtype = "int64", device = x.device }):mul(n + 1)
                rest[#rest + 1] = letters[j]
                return diagonal(x:permute(order):reshape(shape):index_select(#shape, places), rest)
            end
        end
    end
    return x, letters
end

-- The sum over the dimensions for which drop(letter, i) holds, and the letters of the others.
local function without(x, letters, drop)
    local kept, sums = {}, {}
    for i, letter in ipairs(letters) do
        if drop(letter, i) then sums[#sums + 1] = i else kept[#kept + 1] = letter end
    end
    return #sums > 0 and x:sum(sums) or x, kept
end

local MOST_BATCHES = 6 -- dimensions that a product of matrices may have beside two; more become one

-- x as matrices {batch…, rows, columns}, from the side whose last dimension stays where it is.
local function matrices(x, letters, batch, rows, columns, sizes)
    local turned = set_of(rows)[letters[#letters]] ~= nil
    local groups = turned and { batch, columns, rows } or { batch, rows, columns }
    local list, shape = {}, {}
    for k, group in ipairs(groups) do
        local extent = 1
        for _, letter in ipairs(group) do
            list[#list + 1] = letter
            if k == 1 and #batch <= MOST_BATCHES then shape[#shape + 1] = sizes[letter] end
            extent = extent * sizes[letter]
        end
        if k > 1 or #batch > MOST_BATCHES then shape[#shape + 1] = extent end
    end
    x = arranged(x, letters, list)
    if #list ~= #shape or #rows ~= 1 or #columns ~= 1 then x = x:reshape(shape) end
    return turned and x:transpose(-2, -1) or x
end

-- The product of two, with letters in `reads` kept.
local function pair(a, of_a, b, of_b, reads, sizes)
    local in_a, in_b = set_of(of_a), set_of(of_b)
    a, of_a = without(a, of_a, function(letter) return not in_b[letter] and not reads[letter] end)
    b, of_b = without(b, of_b, function(letter) return not in_a[letter] and not reads[letter] end)
    local batch, inner, left, right = {}, {}, {}, {}
    for _, letter in ipairs(of_a) do
        local group = not in_b[letter] and left or reads[letter] and batch or inner
        group[#group + 1] = letter
    end
    for _, letter in ipairs(of_b) do
        if not in_a[letter] then right[#right + 1] = letter end
    end
    local list, shape = {}, {}
    for _, group in ipairs { batch, left, right } do
        for _, letter in ipairs(group) do
            list[#list + 1] = letter
            shape[#shape + 1] = sizes[letter]
        end
    end
    if #inner == 0 then return arranged(a, of_a, list) * arranged(b, of_b, list), list end
    if not a.dtype:find "float" and not b.dtype:find "float" then -- products of matrices are real numbers
        local dims = {}
        for _, letter in ipairs(inner) do
            list[#list + 1] = letter
            dims[#dims + 1] = #list
        end
        local sum = (arranged(a, of_a, list) * arranged(b, of_b, list)):sum(dims)
        return sum, { unpack(list, 1, #list - #inner) }
    end
    a, b = matrices(a, of_a, batch, left, inner, sizes), matrices(b, of_b, batch, inner, right, sizes)
    return te.matmul(a, b):reshape(shape), list
end

--- Sums of products of tensors, with a letter for each dimension: te.einsum("bqd,bkd->bqk", q, k). Letters behind "->"
--- are the dimensions of the result, and all others are summed; without "->" they are those that occur once, in the
--- order of the alphabet. "..." stands for dimensions in front that broadcast; a letter twice in an operand takes its
--- diagonal; dimensions of size 1 broadcast. Operands are multiplied from left to right, by te.matmul where letters
--- that two of them share are summed.
---@param equation string
---@param ... te.Tensor  one for each part between the commas, or one list of them
---@return te.Tensor
return function(equation, ...)
    if type(equation) ~= "string" then
        wrong("equation: expected a string, got %s", te._core.describe(equation))
    end
    local operands, n = { ... }, select("#", ...)
    if n == 1 and type(operands[1]) == "table" and not te.is_tensor(operands[1]) then
        operands = operands[1]
        n = options.list("te.einsum", "operands", operands)
    end
    local text = equation:gsub("%s", "")
    local arrow = text:find("->", 1, true)
    local parts, output = text:sub(1, (arrow or 0) - 1), arrow and text:sub(arrow + 2)
    local inputs = {}
    for part in (parts .. ","):gmatch("(.-),") do inputs[#inputs + 1] = letters_of(part, equation) end
    if #inputs ~= n then wrong("equation %q has %d operands, got %d", equation, #inputs, n) end

    local most, sizes = 0, {} -- dimensions behind "..."
    for i, list in ipairs(inputs) do
        local x, dots = operands[i], set_of(list)["..."] and 1 or 0
        if not te.is_tensor(x) then wrong("operand %d: expected a tensor, got %s", i, te._core.describe(x)) end
        if not pcall(x.dim, x) then wrong("operand %d: tensor was released", i) end
        if x:dim() < #list - dots or dots == 0 and x:dim() > #list then
            wrong("operand %d: {%s} has %d dimensions, equation %q names %d", i, table.concat(x.shape, ","), x:dim(),
                equation, #list - dots)
        end
        most = dots == 1 and math.max(most, x:dim() - #list + 1) or most
        inputs[i] = expand(list, x:dim() - #list + 1)
        for d, letter in ipairs(inputs[i]) do
            local size = x:size(d)
            if (sizes[letter] or 1) ~= 1 and size ~= 1 and size ~= sizes[letter] then
                wrong("operand %d: {%s}: dimension %d is %d, but %s of %q is %d before it", i,
                    table.concat(x.shape, ","), d, size, letter:find("%a") and '"' .. letter .. '"' or '"..."',
                    equation, sizes[letter])
            end
            if size ~= 1 or not sizes[letter] then sizes[letter] = size end
        end
    end
    output = output and expand(letters_of(output, equation), most) or implied(inputs, most)
    for letter, count in pairs(set_of(output)) do
        if count > 1 or not sizes[letter] then
            wrong("equation %q: %q of the result is %s", equation, letter,
                count > 1 and "there twice" or "in no operand")
        end
    end

    local a, of_a
    for i = 1, n do
        local reads = set_of(output)
        for later = i + 1, n do
            for _, letter in ipairs(inputs[later]) do reads[letter] = 1 end
        end
        local b, of_b = diagonal(without(operands[i], inputs[i], function(letter, d)
            return operands[i]:size(d) == 1 and sizes[letter] ~= 1
        end))
        if i == 1 then a, of_a = b, of_b else a, of_a = pair(a, of_a, b, of_b, reads, sizes) end
    end
    local reads = set_of(output)
    a, of_a = without(a, of_a, function(letter) return not reads[letter] end)
    return arranged(a, of_a, output)
end
