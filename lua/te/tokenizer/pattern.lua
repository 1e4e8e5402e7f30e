--- Patterns that tokenizer.json files cut by.
--
-- They are PCRE2's here and Oniguruma's there. So only what means the same in both is let through, and \s is spelled
-- out, which the two disagree on in one character, U+180E. They know different versions of Unicode: letters and digits
-- that are newer than Unicode 14 may be cut apart elsewhere.
--
-- Where case is ignored, Oniguruma takes one character for several ("ss" is found in U+00DF) and the other way round,
-- and looks for both cases of what \p stands for in []. PCRE2 does neither.

local fail = require "te.fail"
local options = require "te.options"
local reader = require "te.tokenizer.reader"

local SPACES = [[\p{Z}\t-\r\x{85}]]

-- Escapes outside of classes, and inside of them.
local OUTSIDE = { s = "[" .. SPACES .. "]", S = "[^" .. SPACES .. "]" }
local INSIDE = { s = SPACES }
for c in ("dDrnt"):gmatch "." do
    OUTSIDE[c], INSIDE[c] = "\\" .. c, "\\" .. c
end

-- Beginnings of groups, and texts of ASCII that one character is in another case.
local OPENINGS = { "^%(%?[:=!>]", "^%(%?<[=!]", "^%(%?<[%a_][%w_]*>" }
local LIGATURES = { ss = true, st = true, ff = true, fi = true, fl = true }

-- What is known at a place of a pattern: ignores, whether case is ignored, by group that is open; begins, whether the
-- innermost one begins here; class, whether it is in []; letter, the one in front where case is ignored.
local State = {}
State.__index = State

function State:refuse(part)
    fail("%s: %s: %s: %s in the pattern %s is not supported", reader.WHO, self.path, self.field, part,
        options.shown(self.pattern))
end

function State:ignores_case() return self.ignores[#self.ignores] end

function State:open(ignores)
    self.ignores[#self.ignores + 1] = ignores
    self.begins = true
end

-- Each of these takes what stands at `at`: how much of it, and what it becomes unless that is the same.

function State:escape(at)
    local escaped = self.pattern:sub(at + 1, at + 1)
    local property = self.pattern:match("^[pP]{%^?[%w_]+}", at + 1)
    self.letter = nil
    if property then
        if self.class and self:ignores_case() then self:refuse("\\" .. property .. " in [] under (?i)") end
        return "\\" .. property
    end
    local meaning = (self.class and INSIDE or OUTSIDE)[escaped] or escaped:find "^%p$" and "\\" .. escaped
    return "\\" .. escaped, meaning or self:refuse("\\" .. escaped .. (self.class and " in []" or ""))
end

function State:group(at)
    local pattern = self.pattern
    local comment = pattern:match("^%(%?#[^\\)]*%)", at)
    if comment then return comment end
    local sign, ending = pattern:match("^%(%?(%-?)i([:)])", at)
    if ending == ":" then
        self:open(sign == "")
    elseif ending then
        if not self.begins then self:refuse "an option that does not stand at the start of its group" end
        self.ignores[#self.ignores] = sign == ""
    end
    if ending then return "(?" .. sign .. "i" .. ending end
    local found = not pattern:find("^[?*]", at + 1) and "("
    for _, opening in ipairs(OPENINGS) do found = found or pattern:match(opening, at) end
    self:open(self:ignores_case())
    return found or self:refuse(pattern:sub(at, at + 2))
end

function State:braces(at)
    local pattern = self.pattern
    local count = pattern:match("^{%d+,?%d*}", at)
    if count then
        local after = pattern:sub(at + #count, at + #count)
        if after == "+" or after == "?" and not count:find(",", 1, true) then self:refuse("}" .. after) end
    elseif pattern:find("^{[%d%s,]", at) then
        self:refuse(pattern:sub(at, at + 1))
    end
    return count or "{"
end

-- Letters follow one another also across the ends of groups, and counts.
function State:character(at)
    local c, before = self.pattern:sub(at, at), self.letter or ""
    self.letter = not self.class and self:ignores_case() and c:find "%a" and c or nil
    if not self:ignores_case() then return c end
    if c:byte() > 127 then self:refuse "what is not ASCII under (?i)" end
    if self.letter and LIGATURES[(before .. c):lower()] then self:refuse(before .. c .. " under (?i)") end
    return c
end

function State:class_part(at)
    local c, two = self.pattern:sub(at, at), self.pattern:sub(at, at + 1)
    if c == "[" or two == "&&" then self:refuse(two .. " in []") end
    self.class = c ~= "]"
    return self:character(at)
end

function State:part(at)
    local c = self.pattern:sub(at, at)
    if c == "(" and not self.class then return self:group(at) end
    self.begins = false
    if c == "\\" then return self:escape(at) end
    if self.class then return self:class_part(at) end
    if c == "{" then return self:braces(at) end
    if c == ")" then
        if #self.ignores > 1 then self.ignores[#self.ignores] = nil end
        return c
    end
    if c == "[" then
        local first = self.pattern:match("^%^?%]", at + 1)
        if first then self:refuse("[" .. first) end
        self.class = true
    end
    return self:character(at)
end

--- The pattern in PCRE2's words. Raises where it has what may mean something else there.
---@param path string     of the file
---@param field string    that has it there
---@param pattern string  Oniguruma's
---@return string
local function translate(path, field, pattern)
    local state = setmetatable({ path = path, field = field, pattern = pattern, ignores = { false }, begins = true },
        State)
    local out, at = {}, 1
    while at <= #pattern do
        local from, to = state:part(at)
        out[#out + 1] = to or from
        at = at + #from
    end
    return table.concat(out)
end

return translate
