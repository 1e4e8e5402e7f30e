--- Files and commands, for specs that run what documents show.

local shell = {}

function shell.read(path)
    local file = assert(io.open(path))
    local text = file:read "*a"
    file:close()
    return text
end

--- What a command prints on both streams, and its exit status.
function shell.capture(command)
    local pipe = assert(io.popen(command .. " 2>&1; echo \"status $?\""))
    local text = pipe:read "*a"
    pipe:close()
    local output, status = text:match "^(.*)status (%d+)\n$"
    return output, tonumber(status)
end

return shell
