-- A script within its limits: the library works as anywhere else, files and processes are not there.
local te = require "te"
local model = te.Sequential(te.Linear(4, 8), te.GELU(), te.Linear(8, 1))
local loss = (model(te.ones { 2, 4 }) ^ 2):mean()
loss:backward()
print("gradients of", #model:parameters(), "parameters")
assert(io == nil and os == nil and debug == nil and package == nil)
