--- trials(all, few): how often to repeat what is drawn at random, or a list of sizes to try. On the CPU `all`; `few`
-- where tensors are made on a device, for every new program is compiled there first; nil: `all` there too. Of a number
-- TETRAIN_SPEC_SHARE takes one in so many on the CPU: test.sh asks for that where sanitizers make each take longer.

local te = require "te"

local share = tonumber(os.getenv "TETRAIN_SPEC_SHARE") or 1

return function(all, few)
    if few and te.get_default_device() ~= "cpu" then return few end
    return type(all) == "number" and math.ceil(all / share) or all
end
