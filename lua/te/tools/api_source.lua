--- te.tools.api_source: everything that `te` offers as comments that ldoc makes pages of. From te.tools.reference, so
--- that operations, which have no Lua source, stand beside what is written in Lua.

local options = require "te.options"
local reference = require "te.tools.reference"

-- The section of a kind of entry.
local SECTION = { maker = "class" }

local SECTIONS = {
    { "operation", "Operations",
        "Functions of the engine. Most are methods of tensors too; options may stand in a table, last." },
    { "function", "Functions", "Making tensors, settings, gradients, files." },
    { "class", "Modules", "Classes: calling one makes a module, calling a module runs it." },
}

local function add_text(out, text)
    local first = true
    for line in ((text == "" and "See the guide." or text) .. "\n"):gmatch "(.-)\n" do
        out[#out + 1] = (first and "--- " or "-- ") .. line
        first = false
    end
end

local function add_entry(out, name, entry, params)
    add_text(out, entry.doc)
    for _, p in ipairs(params) do
        if p.name ~= "..." then
            out[#out + 1] = ("-- @param %s (`%s`) %s"):format(p.name, p.type, p.doc or "")
        end
    end
    for _, row in ipairs(entry.options and options.rows(entry.options) or {}) do
        out[#out + 1] = ("-- @param opts.%s (`%s`) %s"):format(row[1], options.describe(row[2]), row[2].help or "")
    end
    for _, result in ipairs(entry.results) do out[#out + 1] = ("-- @return `%s`"):format(result) end
    out[#out + 1] = "-- @function " .. name .. "\n"
end

local function add_section(out, name, title)
    out[#out + 1] = ("--- %s\n-- @section %s\n"):format(title, name)
end

local function add_members(out, entry)
    for _, member in ipairs(reference.members(entry.name)) do add_entry(out, member.name, member, member.params) end
end

--- The text of a Lua file for ldoc.
---@return string
return function()
    local entries = reference.entries()
    local out = { "--- Tensors, gradients, modules, optimizers.\n-- `local te = require \"te\"`\n-- @module te\n" }
    for _, section in ipairs(SECTIONS) do
        add_section(out, section[1], section[2] .. ". " .. section[3])
        for _, entry in ipairs(entries) do
            local kind = SECTION[entry.kind] or entry.kind
            if kind == section[1] then add_entry(out, entry.name, entry, entry.params) end
        end
    end
    for _, entry in ipairs(entries) do
        if entry.kind == "module" then
            add_section(out, entry.name, ("te.%s. %s"):format(entry.name, entry.doc:gsub("\n", " ")))
            add_members(out, entry)
        end
    end
    add_section(out, "methods", "Methods of tensors. In place with a trailing underscore.")
    for _, entry in ipairs(reference.methods()) do
        add_entry(out, "x:" .. entry.name, entry, entry.native and entry.params or { unpack(entry.params, 2) })
    end
    return table.concat(out, "\n")
end
