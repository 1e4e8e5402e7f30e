--- te.distributed.parts: of parameters that the processes of a group hold parts of, the group: what is said of a whole
--- model, such as the norm of its gradients, is summed over it. Parameters remain the objects that they are.
return setmetatable({}, { __mode = "k" })
