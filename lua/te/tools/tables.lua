--- te.tools.tables: the tables of the documentation, made from what the library declares.
--
-- A document marks where a table goes, and `update` writes it there:
--
--     <!-- table: operations -->
--     <!-- end -->
--
--     tetrain -e 'require("te.tools.tables").update("README.md", "docs/operations.md")'
--
-- The specs compare every document with what would be written.

local te = require "te"
local options = require "te.options"
local reference = require "te.tools.reference"

local tables = {}

local function markdown(header, rows)
    local lines = { "| " .. table.concat(header, " | ") .. " |", ("| --- "):rep(#header) .. "|" }
    for _, row in ipairs(rows) do lines[#lines + 1] = "| " .. table.concat(row, " | ") .. " |" end
    return table.concat(lines, "\n")
end

local function code(text) return "`" .. text:gsub("|", "\\|") .. "`" end

-- Operations by their groups, in the order of declaration: a list of { name, operations }.
local function groups()
    local list, known = {}, {}
    for _, op in ipairs(te.ops_list()) do
        local group = known[op.group]
        if not group then
            group = { name = op.group }
            known[op.group], list[#list + 1] = group, group
        end
        group[#group + 1] = op
    end
    return list
end

local function names_of(list)
    local names = {}
    for i, entry in ipairs(list) do names[i] = code(entry.name) end
    return table.concat(names, " ")
end

-- Which operations there are, and the modules on top of them.
tables["operations"] = function()
    local rows, classes = {}, {}
    for i, group in ipairs(groups()) do rows[i] = { group.name, names_of(group) } end
    for _, entry in ipairs(reference.entries()) do
        if entry.kind == "class" then classes[#classes + 1] = entry end
    end
    rows[#rows + 1] = { "**modules**", names_of(classes) }
    return markdown({ "**operations**", "" }, rows)
end

-- Functions that make tensors, and what classes of one's own write.
tables["creation"] = function()
    local rows = {}
    for _, entry in ipairs(reference.entries()) do
        if entry.common then rows[#rows + 1] = { code(entry.signature), entry.doc } end
    end
    return markdown({ "", "" }, rows)
end

tables["classes to extend"] = function()
    local rows = {}
    for _, name in ipairs { "BasicOperation", "FusedOperation" } do
        rows[#rows + 1] = { code("te." .. name), te[name].sentence }
        for _, entry in ipairs(reference.written(name)) do
            rows[#rows + 1] = { code(entry.signature:match ":(.*)"), entry.doc }
        end
    end
    return markdown({ "", "" }, rows)
end

-- All that is said of them.
tables["operations in full"] = function()
    local parts = {}
    for _, group in ipairs(groups()) do
        local rows = {}
        for i, op in ipairs(group) do rows[i] = { code("te." .. op.signature), (op.doc:gsub("|", "\\|")) } end
        parts[#parts + 1] = "## " .. group.name:sub(1, 1):upper() .. group.name:sub(2)
        parts[#parts + 1] = markdown({ "", "" }, rows)
    end
    return table.concat(parts, "\n\n")
end

-- Recipes ---------------------------------------------------------------------------------------------------------

local ELEMENTS = { float8_e4m3 = "E4M3", float8_e5m2 = "E5M2", float4_e2m1 = "E2M1" }
local SCALES = { e8m0 = "E8M0", float8_e4m3 = "E4M3" }

local function extent(q)
    if not q.block_cols or q.block_cols == 0 then return "tensor" end
    return ("%d x %d"):format(q.block_rows, q.block_cols)
end

-- What a quantizer does to an operand, from its capabilities.
local function describe(q)
    local parts = { ("%s, %s factor per %s"):format(ELEMENTS[q.element], SCALES[q.scale] or "float32", extent(q)) }
    if q.needs_history then parts[1] = parts[1] .. " from earlier steps" end
    if q.hadamard then parts[#parts + 1] = "transformed" end
    if q.stochastic then parts[#parts + 1] = "rounded stochastically" end
    return table.concat(parts, ", ")
end

-- A recipe with the options that it has at first, or the error that names the one it cannot do
-- without; nil for anything else.
local function usual(name)
    local ok, made = pcall(te.recipe[name])
    if ok and te.recipe.is_recipe(made) then return made end
    return not ok and tostring(made):match("te%.recipe%." .. name .. ": option ([%w_]+)")
end

local TYPES = { any = "", size = "from 1 on", callable = "function" }

-- "true or false", "E4M3, HYBRID", "1 to 2".
local function values(declared)
    if declared.choices then return code(table.concat(declared.choices, "` `")) end
    if declared[1] == "boolean" then return "`true` `false`" end
    if declared.below then return ("%g to below %g"):format(declared.min, declared.below) end
    if declared.min and declared.max then return ("%g to %g"):format(declared.min, declared.max) end
    if declared.min and declared[1] ~= "size" then return ("from %g on"):format(declared.min) end
    return TYPES[declared[1]] or declared[1]
end

local function default(declared) return declared[2] == nil and "" or code(options.default(declared)) end

-- Options of the same kind stand in one row with the recipes that have them.
tables["options of recipes"] = function()
    local rows, known = {}, {}
    for _, name in ipairs(options.names(te._core.recipe_kinds())) do
        local recipe = te.recipe[name](name == "Custom" and { qfactory = print } or nil)
        local declared = recipe:declared()
        for _, option in ipairs(options.names(declared)) do
            local d = declared[option]
            local key = table.concat({ option, d.help, tostring(d[2]) }, "\0")
            if known[key] then
                known[key][5] = known[key][5] .. ", " .. name
            else
                known[key] = { code(option), values(d), default(d), d.help, name }
                rows[#rows + 1] = known[key]
            end
        end
    end
    table.sort(rows, function(a, b) return a[1]:gsub("`", "") .. a[5] < b[1]:gsub("`", "") .. b[5] end)
    return markdown({ "option", "values", "default", "", "recipes" }, rows)
end

tables["recipes"] = function()
    local rows, others = {}, {}
    for name in pairs(te.recipe) do
        local recipe = usual(name)
        local row = { code(name) }
        for _, role in ipairs { "input", "weight", "grad_output" } do
            row[#row + 1] = te.recipe.is_recipe(recipe) and describe(recipe:quantizer(role))
                or recipe and code(recipe) .. " says"
        end
        if recipe then table.insert(te.recipe.is_recipe(recipe) and rows or others, row) end
    end
    local function by_name(a, b) return a[1] < b[1] end
    table.sort(rows, by_name)
    table.sort(others, by_name)
    for _, row in ipairs(others) do rows[#rows + 1] = row end
    return markdown({ "", "input", "weight", "gradient" }, rows)
end

-- Options of everything else ----------------------------------------------------------------------------------------

-- Entries of te.tools.reference with options, in the order of sections: { title, entries }.
local function with_options()
    local sections, by_title = {}, {}
    local function add(title, entry)
        if not entry.options then return end
        local section = by_title[title] or { title }
        if not by_title[title] then sections[#sections + 1], by_title[title] = section, section end
        table.insert(section, entry)
    end
    local function add_method(title, signature, method)
        local entry = reference.of_function(method)
        entry.signature, entry.options = signature, options.of(method)
        add(title, entry)
    end
    local entries = reference.entries()
    for _, entry in ipairs(entries) do
        if entry.kind == "class" or entry.kind == "maker" then add("Modules", entry) end
    end
    for _, entry in ipairs(reference.members "optim") do add("Optimizers", entry) end
    add_method("Optimizers", "optimizer:step(opts)", require("te.optim.optimizer").step)
    for _, entry in ipairs(reference.members "models") do add("Models", entry) end
    add_method("Models", "model(ids, targets, opts)", require("te.decoder").forward)
    add_method("Models", "model:generate(ids, count, opts)", require("te.decoder").generate)
    local encoder = require "te.encoder"
    add_method("Models", "encoder(ids, targets, opts)", encoder.forward)
    add_method("Models", "encoder:pooled(ids, opts)", encoder.pooled)
    add_method("Models", "embedder:encode(texts, opts)", require("te.embedder").Embedder.encode)
    for _, entry in ipairs(reference.members "lora") do add("Adapters", entry) end
    for _, entry in ipairs(reference.members "data") do add("Data", entry) end
    for _, entry in ipairs(entries) do
        if entry.kind == "function" then add("Functions", entry) end
    end
    for _, library in ipairs { "distributed", "numerics", "train" } do
        for _, entry in ipairs(reference.members(library)) do add("Functions", entry) end
    end
    return sections
end

local function option_rows(entry)
    local rows = {}
    for i, row in ipairs(options.rows(entry.options)) do
        local d = row[2]
        rows[i] = { code(row[1]), values(d), default(d), ((d.help or ""):gsub("|", "\\|")) }
    end
    return markdown({ "option", "values", "default", "" }, rows)
end

-- What has the same options stands under one heading.
tables["options"] = function()
    local parts = {}
    for _, section in ipairs(with_options()) do
        parts[#parts + 1] = "### " .. section[1]
        local heads, order = {}, {}
        for i = 2, #section do
            local entry = section[i]
            local rows, doc = option_rows(entry), entry.doc:gsub("%s*\n%s*", " ")
            if not heads[rows] then order[#order + 1], heads[rows] = rows, {} end
            table.insert(heads[rows], ("* %s: %s"):format(code(entry.signature), doc))
        end
        for _, rows in ipairs(order) do
            parts[#parts + 1] = table.concat(heads[rows], "\n")
            parts[#parts + 1] = rows
        end
    end
    return table.concat(parts, "\n\n")
end

-- Documents -------------------------------------------------------------------------------------------------------

--- A document with the tables that it asks for as they should be.
---@param text string
---@return string
function tables.fill(text)
    return (text:gsub("(<!%-%- table: ([%w ]+) %-%->\n).-(<!%-%- end %-%->)", function(first, name, last)
        local make = tables[name] or error(("no table %q"):format(name), 0)
        return ("%s\n%s\n\n%s"):format(first, make(), last)
    end))
end

--- Writes the tables of files anew.
---@param ... string  paths
function tables.update(...)
    for _, path in ipairs { ... } do
        local file = assert(io.open(path))
        local text = file:read "*a"
        file:close()
        file = assert(io.open(path, "w"))
        assert(file:write(tables.fill(text)))
        assert(file:close())
    end
end

return tables
