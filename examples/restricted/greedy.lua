local kept = {}
for i = 1, 1e9 do kept[i] = { i } end
