--- trials(all, few): how often to repeat what is drawn at random, or a list of sizes to try. On the CPU `all`; `few`
-- where tensors are made on a device, for every new program is compiled there first.

local te = require "te"

return function(all, few) return te.get_default_device() == "cpu" and all or few end
