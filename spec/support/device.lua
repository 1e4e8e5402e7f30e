--- What cards do with the products of bytes.

local te = require "te"

local device = {}

--- Whether tensor cores keep 13 bits behind the leading one of sums of fp8 products: Ada's and Hopper's, for 128
--- summands also where the sums are to be exact. What is added up elsewhere in float32 then differs in norm by some
--- 5e-4, and single elements near 0 by more than they are.
function device.has_short_sums()
    local title = te._core.device_title("cuda")
    if title:find("^Fake GPU") then return os.getenv("TE_FAKE_SHORT_SUMS") ~= nil end
    return title:find("sm_89", 1, true) ~= nil or title:find("sm_90", 1, true) ~= nil
end

--- Whether tensors are made on a card unless something else is said; the made-up one is none.
function device.is_card()
    return te.get_default_device():find "^cuda" and not te._core.device_title("cuda"):find "^Fake GPU" and true or false
end

--- Likewise, whether its sums are such short ones.
function device.sums_shortly() return te.get_default_device():find "^cuda" and device.has_short_sums() end

--- The norm of a - b beside that of b.
function device.distance(a, b)
    a, b = a:detach():to("cpu"):to("float64"), b:detach():to("cpu"):to("float64")
    return ((a - b):norm() / (b:norm() + 1e-12)):item()
end

return device
