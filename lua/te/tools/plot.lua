--- tetrain plot RUN...: loss, throughput and gradient norm of training runs, in the terminal and as an SVG.

local te = require "te"
local files = require "te.files"
local train = te.train

local command_line = train.command_line {
    script = "plot",
    about = "Draws loss, throughput and gradient norm of training runs: folders, or their metrics.jsonl.",
    arguments = { "RUN...", min = 1 },
    { "svg", "string", help = "file to write; default: plot.svg in the first run's folder" },
    { "smooth", "number", 0, min = 0, max = 0.999, help = "fraction of the running mean that is kept at each step" },
    { "panel", "string", choices = { "loss", "tokens_per_s", "grad_norm" }, help = "draw only this panel" },
    { "from", "size", 1, help = "first step to draw" },
    { "height", "size", 12, max = 100, help = "lines of a plot in the terminal" },
    { "terminal", "boolean", true, help = "draw in the terminal as well" },
}

local PANELS = { { "loss", "loss" }, { "tokens_per_s", "tokens/s" }, { "grad_norm", "gradient norm" } }
local COLOURS = { "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf" }
local MARKS = { "*", "+", "o", "x", "#", "@" }

-- Reading -------------------------------------------------------------------------------------------------------------

-- Points {step, value} of one number in a run; values that are not finite and lines cut off by a crash are skipped.
local function points(lines, name)
    local found = {}
    local pattern = '"' .. name .. '":([-%d.e+]+)'
    for _, line in ipairs(lines) do
        local step, value = tonumber(line:match '"step":(%d+)'), tonumber(line:match(pattern))
        if step and value and value - value == 0 and line:sub(-1) == "}" then found[#found + 1] = { step, value } end
    end
    return found
end

local function read_run(path)
    local stat, problem = te._core.stat(path)
    if not stat then error(problem, 0) end
    local file
    if stat.type == "directory" then path = path:gsub("/+$", "") .. "/metrics.jsonl" end
    file, problem = io.open(path)
    if not file then error(problem, 0) end
    local lines = {}
    for line in file:lines() do lines[#lines + 1] = line end
    file:close()
    local run = { name = path:match "([^/]+)/metrics%.jsonl$" or path, folder = path:match "^(.*)/[^/]*$" or "." }
    for _, panel in ipairs(PANELS) do run[panel[1]] = points(lines, panel[1]) end
    if #run.loss == 0 then error(("%s: no steps in it"):format(path), 0) end
    return run
end

local function smoothed(list, factor)
    local mean, found = nil, {}
    for i, p in ipairs(list) do
        mean = mean and factor * mean + (1 - factor) * p[2] or p[2]
        found[i] = { p[1], mean }
    end
    return found
end

-- Axes ----------------------------------------------------------------------------------------------------------------

-- Least and largest step and value over all runs.
local function bounds(series)
    local x0, x1, y0, y1 = math.huge, -math.huge, math.huge, -math.huge
    for _, list in ipairs(series) do
        for _, p in ipairs(list) do
            x0, x1 = math.min(x0, p[1]), math.max(x1, p[1])
            y0, y1 = math.min(y0, p[2]), math.max(y1, p[2])
        end
    end
    if x0 == x1 then x1 = x0 + 1 end
    local size = math.max(math.abs(y0), math.abs(y1))
    if y1 - y0 <= 1e-9 * size then -- as good as one value: steps between ticks would be lost beside it
        local more = math.max(0.5, 1e-3 * size)
        y0, y1 = y0 - more, y1 + more
    end
    return x0, x1, y0, y1
end

-- Round numbers within [low, high], about `n` of them.
local function ticks(low, high, n)
    local rough = (high - low) / n
    local power = 10 ^ math.floor(math.log10(rough))
    local step = power
    for _, factor in ipairs { 1, 2, 5, 10 } do
        step = power * factor
        if step >= rough then break end
    end
    local found, i = {}, math.ceil(low / step)
    while i * step <= high do
        found[#found + 1] = i * step
        i = i + 1
    end
    return found
end

local function number_text(x)
    if math.abs(x) >= 1e6 then return ("%.3gM"):format(x / 1e6) end
    if math.abs(x) >= 1e4 then return ("%.3gk"):format(x / 1e3) end
    return ("%.4g"):format(x)
end

-- Terminal ------------------------------------------------------------------------------------------------------------

local function terminal_panel(title, series, width, height)
    local x0, x1, y0, y1 = bounds(series)
    local rows = {}
    for r = 1, height do rows[r] = {} end
    for k, list in ipairs(series) do
        for _, p in ipairs(list) do
            local column = 1 + math.floor((p[1] - x0) / (x1 - x0) * (width - 1) + 0.5)
            local row = height - math.floor((p[2] - y0) / (y1 - y0) * (height - 1) + 0.5)
            rows[row][column] = MARKS[(k - 1) % #MARKS + 1]
        end
    end
    print(title)
    for r = 1, height do
        local text = {}
        for c = 1, width do text[c] = rows[r][c] or " " end
        local label = r == 1 and number_text(y1) or r == height and number_text(y0) or ""
        print((("%9s |%s"):format(label, table.concat(text)):gsub("%s+$", "")))
    end
    local left, right = number_text(x0), number_text(x1)
    print(("%9s +%s"):format("", ("-"):rep(width)))
    print(("%10s %s%s%s\n"):format("", left, (" "):rep(math.max(1, width - #left - #right)), right))
end

-- SVG -----------------------------------------------------------------------------------------------------------------

local WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 240, 70, 20, 34, 30

local ENTITIES = { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" }

local function escape(text) return (text:gsub("[&<>\"]", ENTITIES)) end

local function svg_axes(out, title, top, x0, x1, y0, y1, at)
    local function add(...) out[#out + 1] = string.format(...) end
    add('<text x="%d" y="%d" font-weight="bold">%s</text>', LEFT, top + 18, escape(title))
    for _, y in ipairs(ticks(y0, y1, 4)) do
        local _, v = at(x0, y)
        add('<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="#ddd"/>', LEFT, v, WIDTH - RIGHT, v)
        add('<text x="%d" y="%.1f" text-anchor="end">%s</text>', LEFT - 6, v + 4, number_text(y))
    end
    for _, x in ipairs(ticks(x0, x1, 6)) do
        add('<text x="%.1f" y="%d" text-anchor="middle">%s</text>', (at(x, y0)), top + HEIGHT - BOTTOM + 16,
            number_text(x))
    end
    add('<rect x="%d" y="%d" width="%d" height="%d" fill="none" stroke="#888"/>', LEFT, top + TOP, WIDTH - LEFT - RIGHT,
        HEIGHT - TOP - BOTTOM)
end

local function svg_panel(out, title, series, top)
    local x0, x1, y0, y1 = bounds(series)
    local function at(x, y)
        return LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT),
            top + HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)
    end
    svg_axes(out, title, top, x0, x1, y0, y1, at)
    for k, list in ipairs(series) do
        local text = {}
        for i, p in ipairs(list) do text[i] = ("%.1f,%.1f"):format(at(p[1], p[2])) end
        out[#out + 1] = ('<polyline fill="none" stroke="%s" stroke-width="1.5" points="%s"/>'):format(
            COLOURS[(k - 1) % #COLOURS + 1], table.concat(text, " "))
    end
end

local function svg(runs, panels)
    local height = HEIGHT * #panels + 24
    local out = { ('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" '
        .. 'font-size="12">'):format(WIDTH, height), '<rect width="100%" height="100%" fill="white"/>' }
    for i, panel in ipairs(panels) do svg_panel(out, panel.title, panel.series, (i - 1) * HEIGHT) end
    local x = LEFT
    for k, run in ipairs(runs) do
        out[#out + 1] = ('<text x="%d" y="%d" fill="%s">%s</text>'):format(x, height - 8,
            COLOURS[(k - 1) % #COLOURS + 1], escape(run.name))
        x = x + 20 + 7 * #run.name
    end
    out[#out + 1] = "</svg>\n"
    return table.concat(out, "\n")
end

local function later(list, from)
    local found = {}
    for _, p in ipairs(list) do if p[1] >= from then found[#found + 1] = p end end
    return found
end

local function panels_of(runs, o)
    local panels = {}
    for _, row in ipairs(PANELS) do
        local series, some = {}, false
        for k, run in ipairs(runs) do
            series[k] = later(smoothed(run[row[1]], o.smooth), o.from)
            some = some or #series[k] > 0
        end
        if some and (o.panel or row[1]) == row[1] then panels[#panels + 1] = { title = row[2], series = series } end
    end
    return panels
end

return function(words)
    local o = command_line:parse(words)
    local runs = {}
    for i, path in ipairs(o.arguments) do runs[i] = train.io(read_run, path) end
    local panels = panels_of(runs, o)
    if #panels == 0 then
        command_line:refuse("there is %s of a step from %d on", o.panel and "no " .. o.panel or "nothing", o.from)
    end
    if o.terminal then
        local width = math.max(20, math.min(te._core.terminal_width(), 120) - 12)
        for _, panel in ipairs(panels) do terminal_panel(panel.title, panel.series, width, o.height) end
        for k, run in ipairs(runs) do
            local mark = MARKS[(k - 1) % #MARKS + 1]
            local n = #run.loss
            print(("%s %s: %d step%s, last loss %.4f"):format(mark, run.name, n, n == 1 and "" or "s", run.loss[n][2]))
        end
    end
    local path = o.svg or runs[1].folder .. "/plot.svg"
    local written, problem = files.write(path, svg(runs, panels))
    if written then
        print(path)
    elseif o.terminal and not o.svg then -- what was drawn does without a file in a folder that takes none
        io.stderr:write("plot: no SVG: ", problem, "\n")
    else
        train.fail(train.exit.io, problem)
    end
end
