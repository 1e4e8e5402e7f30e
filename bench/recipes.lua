-- The table of bench/recipes.sh: tetrain bench/recipes.lua RUN..., the first being the one that others are compared to.

local function read(folder)
    local run = { name = folder:match "([^/]+)/*$", steps = 0, times = {} }
    for line in io.lines(folder .. "/metrics.jsonl") do
        run.steps = tonumber(line:match '"step":(%d+)')
        run.times[#run.times + 1] = tonumber(line:match '"ms":([-%d.e+]+)')
        run.val_loss = tonumber(line:match '"val_loss":([-%d.e+]+)') or run.val_loss
    end
    table.sort(run.times)
    run.ms = run.times[math.ceil(#run.times / 10)] -- a tenth of the steps are faster: others may use the machine too
    return run
end

local base
print(("%-10s %6s %16s %8s %14s %8s"):format("recipe", "steps", "validation loss", "ratio", "ms per step", "ratio"))
for _, folder in ipairs(arg) do
    local run = read(folder)
    base = base or run
    print(("%-10s %6d %16.4f %8.4f %14.1f %8.2f"):format(run.name, run.steps, run.val_loss,
        run.val_loss / base.val_loss, run.ms, run.ms / base.ms))
end
