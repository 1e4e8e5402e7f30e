--- A plan as SVG: one row per step, its bar as wide as its share of the bytes of the pass.

local ROW, WIDTH, GAP, TOP = 46, 430, 30, 44

local COLORS = { program = "#4c8bd6", gemm = "#d68a3c", attention = "#6aa84f", call = "#999999" }

local STYLE = [[
<style>
text { font-family: sans-serif; font-size: 13px; fill: #1b1b1b }
.small { font-size: 11px; fill: #555 }
.head { font-size: 15px; font-weight: bold }
.ground { fill: #ffffff }
.lane { fill: #f1f3f5 }
@media (prefers-color-scheme: dark) {
  text { fill: #e8e8e8 } .small { fill: #b0b0b0 } .ground { fill: #16181c } .lane { fill: #23272e }
}
</style>
]]

local ENTITIES = { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" }

local function escaped(text) return (text:gsub('[&<>"]', ENTITIES)) end

local function shortened(text, limit) return #text > limit and text:sub(1, limit - 1) .. "…" or text end

return function(plan, amount)
    local out, height = {}, TOP + math.max(#plan.forward, #plan.backward, 1) * ROW + 16
    local columns = #plan.backward > 0 and 2 or 1
    local width = columns * WIDTH + (columns + 1) * GAP
    out[#out + 1] = ('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d">\n')
        :format(width, height, width, height) .. STYLE .. '<rect class="ground" width="100%" height="100%"/>\n'
    for column, pass in ipairs { "forward", "backward" } do
        local left, largest = GAP + (column - 1) * (WIDTH + GAP), 1
        for _, step in ipairs(plan[pass]) do largest = math.max(largest, step.bytes) end
        if #plan[pass] > 0 then
            out[#out + 1] = ('<text class="head" x="%d" y="28">%s</text>\n'):format(left, pass)
        end
        for i, step in ipairs(plan[pass]) do
            local y = TOP + (i - 1) * ROW
            out[#out + 1] = ('<rect class="lane" x="%d" y="%d" width="%d" height="%d" rx="4"/>\n')
                :format(left, y, WIDTH, ROW - 6)
            out[#out + 1] = ('<rect x="%d" y="%d" width="%.1f" height="5" rx="2" fill="%s"/>\n')
                :format(left, y + ROW - 11, math.max(2, WIDTH * step.bytes / largest),
                    COLORS[step.kind] or COLORS.call)
            out[#out + 1] = ('<text x="%d" y="%d">%s</text>\n'):format(left + 8, y + 16,
                escaped(shortened(step.name, 58)))
            out[#out + 1] = ('<text class="small" x="%d" y="%d">%s · reads %sB · writes %sB · %sFLOP</text>\n')
                :format(left + 8, y + 31, escaped(step.kernels[1]),
                    amount(step.reads), amount(step.writes), amount(step.flops))
        end
    end
    out[#out + 1] = "</svg>\n"
    return table.concat(out)
end
