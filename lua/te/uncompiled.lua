--- Keeps functions, with those inside them, from being compiled. A trace holds the closures that it was recorded in for
--- good, and so a whole model where they have one among their variables.

---@param ... function
return function(...)
    for i = 1, jit and select("#", ...) or 0 do jit.off((select(i, ...)), true) end
end
