--- tetrain inspect FILE...: tensors and metadata of safetensors files, read from their headers alone.

local te = require "te"
local options = require "te.options"
local train = te.train

local command_line = train.command_line {
    script = "inspect",
    about = "Lists the tensors and metadata of safetensors files.",
    arguments = { "FILE...", min = 1 },
    { "values", "boolean", false, help = "mean, standard deviation, least and largest value of each tensor" },
}

local LONGEST = 60 -- characters of a metadata value

local function bytes_text(bytes)
    local units, i = { "B", "KB", "MB", "GB", "TB" }, 1
    while bytes >= 1024 and i < #units do bytes, i = bytes / 1024, i + 1 end
    return (i == 1 and "%d %s" or "%.1f %s"):format(bytes, units[i])
end

local function statistics(x)
    if x:numel() == 0 then return "" end
    local y = x:to("float64")
    local mean = y:mean():item()
    local deviation = math.sqrt(math.max(0, (y * y):mean():item() - mean * mean))
    return ("  mean %.4g  std %.4g  min %.4g  max %.4g"):format(mean, deviation, te.min(y):item(), te.max(y):item())
end

-- A text of a file in one line, in which nothing speaks to the terminal.
local function line_of(text) return (text:gsub("%c", " ")) end

local function print_metadata(metadata)
    for _, name in ipairs(options.names(metadata)) do
        local value = metadata[name]
        local text = line_of(value)
        if #text > LONGEST then text = ("%s... (%d characters)"):format(text:sub(1, LONGEST), #value) end
        print(("  %s = %s"):format(line_of(name), text))
    end
end

local function inspect(path, with_values)
    local entries, metadata = te._core.safetensors_entries(path)
    local readable = {}
    for _, e in ipairs(entries) do readable[e.name] = e.readable end
    local function is_readable(name) return readable[name] end
    local tensors = with_values and select(2, te._core.safetensors_read(path, is_readable)) or {}
    local width, elements, bytes = 0, 0, 0
    for _, e in ipairs(entries) do
        width = math.max(width, #e.name)
        elements, bytes = elements + e.numel, bytes + e.bytes
    end
    print(("%s: %d tensors, %d elements, %s"):format(path, #entries, elements, bytes_text(bytes)))
    print_metadata(metadata)
    for _, e in ipairs(entries) do
        print(("  %s  %-9s {%s}  %s%s"):format(options.padded(line_of(e.name), width), e.dtype,
            table.concat(e.shape, ", "), bytes_text(e.bytes), tensors[e.name] and statistics(tensors[e.name]) or ""))
    end
end

return function(words)
    local o = command_line:parse(words)
    for _, path in ipairs(o.arguments) do train.io(inspect, path, o.values) end
end
