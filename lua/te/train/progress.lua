--- te.train.Progress: one line that is redrawn on a terminal that can, plain lines otherwise.

local te = require "te"

local Progress = {}
Progress.__index = Progress

local REDRAW_EVERY = 0.1 -- seconds: a terminal costs more than a small model's step

--- One line that is redrawn on a terminal that can, plain lines otherwise.
---@param opts table  steps, log_interval (plain lines come at the first, every so many and the last step),
---                   flops_per_token and peak_flops (for the share of the machine's peak), silent (shows nothing),
---                   plain (lines on a terminal, too)
function Progress.new(opts)
    local terminal = te._core.isatty(1) and os.getenv "TERM" ~= "dumb" and not opts.plain
    return setmetatable({
        steps = opts.steps, log_interval = opts.log_interval, flops_per_token = opts.flops_per_token,
        peak_flops = opts.peak_flops, silent = opts.silent, terminal = terminal,
        drawn_at = 0, drawn = false, seconds = nil,
    }, Progress)
end

local function duration(seconds)
    if seconds >= 3600 then return ("%d:%02d:%02d"):format(seconds / 3600, seconds / 60 % 60, seconds % 60) end
    return ("%d:%02d"):format(seconds / 60, seconds % 60)
end

local function count(n)
    if n >= 1e6 then return ("%.1fM"):format(n / 1e6) end
    if n >= 1e4 then return ("%.0fk"):format(n / 1e3) end
    return ("%.0f"):format(n)
end

local function line(self, s)
    local parts = {
        ("step %d/%d"):format(s.step, self.steps),
        ("loss %.4f"):format(s.loss),
        ("lr %.2e"):format(s.lr),
        ("grad %.3f"):format(s.grad_norm),
        ("%.1f ms"):format(s.ms),
        ("%s tok/s"):format(count(s.tokens_per_s)),
    }
    if self.peak_flops then
        parts[#parts + 1] = ("%.0f%% of peak"):format(100 * s.tokens_per_s * self.flops_per_token / self.peak_flops)
    end
    parts[#parts + 1] = ("%.0f MB"):format(te._core.rss() / 2 ^ 20)
    parts[#parts + 1] = duration((self.steps - s.step) * self.seconds) .. " left"
    return table.concat(parts, "  ")
end

--- Shows a step: { step =, loss =, lr =, grad_norm =, ms =, tokens_per_s = }.
function Progress:update(s)
    if self.silent then return end
    local seconds = s.ms / 1000
    -- a running mean, so that the time left neither jumps nor remembers the first, slow steps for long
    self.seconds = self.seconds and 0.95 * self.seconds + 0.05 * seconds or seconds
    if self.terminal then
        local now = te._core.clock()
        if now - self.drawn_at < REDRAW_EVERY and s.step < self.steps then return end
        self.drawn_at, self.drawn = now, true
        io.stdout:write("\r\27[K", line(self, s):sub(1, te._core.terminal_width() - 1))
        io.stdout:flush()
    elseif s.step == 1 or s.step % self.log_interval == 0 or s.step == self.steps then
        io.stdout:write(line(self, s), "\n")
        io.stdout:flush()
    end
end

--- Prints a message without tearing the line.
function Progress:print(format, ...)
    if self.silent then return end
    if self.drawn then io.stdout:write("\r\27[K") end
    self.drawn = false
    io.stdout:write(select("#", ...) > 0 and format:format(...) or format, "\n")
    io.stdout:flush()
end

--- Leaves the last line standing.
function Progress:finish()
    if self.drawn then io.stdout:write("\n") end
    self.drawn = false
    io.stdout:flush()
end

return Progress
