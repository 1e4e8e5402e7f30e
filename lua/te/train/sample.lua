--- te.train.sample: what a model writes, where it can.

--- What model:generate(ids, count, opts) gives; nil and the reason where the model's logits are not finite, as those of
--- a model that training has driven too far.
---@param model table
---@param ids te.Tensor
---@param count integer
---@param opts table
---@return te.Tensor|nil ids
---@return string|nil problem
return function(model, ids, count, opts)
    local made, result = pcall(model.generate, model, ids, count, opts)
    if made then return result end
    if not tostring(result):find("generate: the logits are not finite", 1, true) then error(result, 0) end
    return nil, ("the logits of %s are not finite"):format(model.__name)
end
