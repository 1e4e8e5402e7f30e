--- fail(format, …): raises a message at the line of the script that called into the library, however deep inside the
--- mistake is found.

local raise = require("te")._core.fail

---@param format string  the whole message when nothing follows
return function(format, ...)
    raise(select("#", ...) > 0 and format:format(...) or format)
end
