--- Command lines from one table of defaults.
--
--     local options = te.train.command_line {
--         script = "train_gpt.lua", about = "Trains a GPT.",
--         { "learning-rate", "number", 1e-3, min = 0, max = 10, help = "…" }, …,
--         presets = { name = { ["learning-rate"] = 1e-4 } },
--     }
--     local o = options:parse(arg)          -- o.learning_rate
--
-- --key=value and --key value are the same, - and _ too. A boolean stands alone (--resume) or takes true or false.
-- A row with told = function() … end has its say in restore: true where something but the command line gave the value.
-- With presets there is an option --preset: its values stand between the defaults and what the command line says.
-- Words that are no options are an error unless arguments = { "FILE", help = "…", min = 1, max = 1 } is declared; they
-- are o.arguments then. With rest = true everything from the first of them on is: the words of somebody else's script.

local fail = require "te.fail"
local options = require "te.options"
local run = require "te.train.run"

local CommandLine = {}
CommandLine.__index = CommandLine

local function key_of(name) return (name:gsub("%-", "_")) end

--- Ends the script for its options, as for those that do not go together.
---@param format string  as string.format takes it
function CommandLine:refuse(format, ...)
    run.fail(run.exit.usage, ("%s: " .. format):format(self.script, ...))
end

local function usage(self, message) self:refuse("%s (--help lists the options)", message) end

--- A command line: parse(arg) gives the values of its options, help() the text of --help.
---@param declared table  script, about, and rows { name, type, default, min =, max =, choices =, help = }; presets:
---                       values by name, by the name of the preset; arguments { NAME, help =, min =, max = }: words
---                       that are no options
local function new(declared)
    local tool = type(arg) == "table" and arg[0] -- "train" for a script that was embedded as a tool
    local embedded = tool and not tool:find("[./]") and tool ~= "-"
    local self = setmetatable({ script = embedded and tool or declared.script, about = declared.about,
        rows = {}, by_key = {},
        presets = declared.presets, arguments = declared.arguments }, CommandLine)
    for i, row in ipairs(declared) do self.rows[i] = row end
    if self.presets then
        table.insert(self.rows, 1, { "preset", "string", choices = options.names(self.presets),
            help = "a set of options; further options may follow" })
    end
    for _, row in ipairs(self.rows) do
        local check = { row[2], row[3], min = row.min, max = row.max, choices = row.choices }
        self.by_key[key_of(row[1])] = { name = row[1], row = row, check = check }
    end
    return self
end

-- The value that a word means for an option, and what is wrong with it.
local function convert(option, word)
    local kind, value = option.check[1], word
    if kind == "boolean" then
        value = ({ ["true"] = true, ["false"] = false })[word]
        if value == nil then value = word end
    elseif kind ~= "string" then
        value = tonumber(word)
        if value == nil or value - value ~= 0 then value = word end
    end
    local reason = options.reason(option.check, value)
    if value == "" and option.check[2] ~= "" then reason = reason or 'expected a text, got ""' end
    return value, reason
end

local function find(self, name)
    local option = self.by_key[key_of(name)]
    if option then return option end
    local names = {}
    for _, row in ipairs(self.rows) do names[#names + 1] = row[1] end
    local near = options.nearest(name, names)
    usage(self, ("unknown option --%s%s"):format(name, near and (", did you mean --%s?"):format(near) or ""))
end

local function check_arguments(self, found)
    local declared = self.arguments
    if #found < (declared.min or 0) then usage(self, ("%s is missing"):format(declared[1])) end
    if #found > (declared.max or math.huge) then
        usage(self, ("unexpected argument %q"):format(found[declared.max + 1]))
    end
end

-- The option at position i as key and value, and the position behind it.
local function read_option(self, words, i)
    local name, value = words[i]:match("^%-%-([^=]+)=(.*)$")
    local option = find(self, name or words[i]:match("^%-%-(.+)$"))
    if value == nil then
        local following = words[i + 1]
        if option.check[1] == "boolean" and following ~= "true" and following ~= "false" then
            value = "true"
        elseif following == nil then
            usage(self, ("--%s: expected %s"):format(option.name, options.describe(option.check)))
        else
            value, i = following, i + 1
        end
    end
    local converted, reason = convert(option, value)
    if reason then usage(self, ("--%s: %s"):format(option.name, reason)) end
    return key_of(option.name), converted, i + 1
end

-- Options that the words give, by key, and the words that are no options.
local function read(self, words)
    local given, found, i = {}, {}, 1
    while words[i] do
        local word = words[i]
        if word == "--help" or word == "-h" then
            io.stdout:write(self:help())
            run.fail(run.exit.ok)
        elseif word:find("^%-%-help=") then
            usage(self, "--help takes no value")
        elseif word:find("^%-%-.") then
            local key, value
            key, value, i = read_option(self, words, i)
            given[key] = value
        elseif not self.arguments then
            usage(self, ("unexpected argument %q"):format(word))
        else
            local last = self.arguments.rest and #words or i
            for k = i, last do found[#found + 1] = words[k] end
            i = last + 1
        end
    end
    if self.arguments then
        check_arguments(self, found)
        given.arguments = found
    end
    return given
end

local function defaults(self)
    local values = {}
    for key, option in pairs(self.by_key) do values[key] = option.check[2] end
    return values
end

--- Values of all options by key: defaults, then the preset's, then the given ones.
---@param words string[]
---@return table values
---@return table given  only what the command line said, by a preset as well
function CommandLine:parse(words)
    local given, values = read(self, words), defaults(self)
    for name, value in pairs(given.preset and self.presets[given.preset] or {}) do
        local option = self.by_key[key_of(name)]
        local reason = not option and "no such option" or options.reason(option.check, value)
        if reason then fail("preset %s: %s: %s", given.preset, name, reason) end
        if given[key_of(name)] == nil then given[key_of(name)] = value end
    end
    for key, value in pairs(given) do values[key] = value end
    return values, given
end

--- The values as texts by "option.<key>", for a checkpoint; those that say where a run is kept are left out.
function CommandLine:texts(values)
    local texts = {}
    for key in pairs(self.by_key) do
        if values[key] ~= nil and key ~= "out" and key ~= "resume" and key ~= "preset" then
            texts["option." .. key] = type(values[key]) == "number" and ("%.17g"):format(values[key])
                or tostring(values[key])
        end
    end
    return texts
end

--- Replaces the values that the command line did not give, nor anybody else as a row's `told` says, by those of a
--- checkpoint.
function CommandLine:restore(values, given, texts)
    for key, option in pairs(self.by_key) do
        local text, told = texts["option." .. key], option.row.told
        if text and given[key] == nil and not (told and told()) then
            local value, reason = convert(option, text)
            if reason then error(("option.%s: %s"):format(key, reason), 0) end
            values[key] = value
        end
    end
end

-- A value, or its text, for people.
local function value_text(value)
    if value == nil or value == "" then return "" end
    return tonumber(value) and ("%.7g"):format(value) or tostring(value)
end

--- The first of the named options that the command line gave another value than a checkpoint has, and both as texts.
--- What the checkpoint does not say had its default, which is none for some.
function CommandLine:changed(given, texts, names)
    local wanted, plain = self:texts(given), self:texts(defaults(self))
    for _, name in ipairs(names) do
        local key = "option." .. key_of(name)
        local kept = texts[key] or plain[key]
        if wanted[key] and wanted[key] ~= kept then
            return name, value_text(wanted[key]), kept and value_text(kept) or "the default"
        end
    end
end

--- The values as somebody would type them, { ["--lr"] = "0.001" }, but for those of the options that are named.
function CommandLine:words(values, but)
    local words = {}
    for key, option in pairs(self.by_key) do
        if values[key] ~= nil then words["--" .. option.name] = options.exact(values[key]) end
    end
    for _, name in ipairs(but) do words["--" .. name] = nil end
    return words
end

--- The text of --help.
function CommandLine:help()
    local takes = #self.rows > 0 and " [--option=value …]" or ""
    local words = self.arguments and " " .. self.arguments[1] or ""
    local lines = { ("usage: tetrain %s%s%s\n"):format(self.script, takes, words), self.about }
    if #self.rows > 0 then lines[#lines + 1] = "" end
    for _, row in ipairs(self.rows) do
        if row.section then lines[#lines + 1] = "\n" .. row.section end
        local default = value_text(row[3])
        local check = self.by_key[key_of(row[1])].check
        lines[#lines + 1] = ("  --%-18s %s%s"):format(row[1], row.help or "",
            default ~= "" and (" [%s]"):format(default) or "")
        if row.choices then lines[#lines] = lines[#lines] .. "; " .. options.describe(check) end
    end
    if self.presets then
        lines[#lines + 1] = "\nPresets"
        for _, name in ipairs(options.names(self.presets)) do
            local parts = options.names(self.presets[name])
            for i, key in ipairs(parts) do parts[i] = key .. "=" .. value_text(self.presets[name][key]) end
            lines[#lines + 1] = ("  %s: %s"):format(name, table.concat(parts, " "))
        end
    end
    return table.concat(lines, "\n") .. "\n"
end

return new
