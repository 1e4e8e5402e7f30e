-- Raises unless two tensors have the same shape and numbers, up to `tolerance` of 1 and of the expected number.

local function values(t) return t:detach():to("cpu"):to("float64"):reshape({ -1 }):totable() end

return function(expected, got, tolerance)
    local shapes = { table.concat(expected.shape, ","), table.concat(got.shape, ",") }
    assert(shapes[1] == shapes[2], ("shape {%s}, expected {%s}"):format(shapes[2], shapes[1]))
    local a, b = values(expected), values(got)
    for i = 1, #a do
        local near = math.abs(a[i] - b[i]) <= tolerance * (1 + math.abs(a[i]))
        assert(near, ("%d: %.9g, expected %.9g"):format(i, b[i], a[i]))
    end
end
