-- pcall does not keep it alive.
while true do pcall(function() while true do end end) end
