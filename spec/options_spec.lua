local options = require "te.options"

describe("te.options", function()
    local declared = { eps = { "number", 1e-5, min = 0 }, bias = { "boolean", true }, mode = { "string", "a",
        choices = { "a", "b" } }, count = { "size" } }

    it("fills in defaults", function()
        assert.same({ eps = 1e-5, bias = true, mode = "a" }, options.check("f", nil, declared))
        assert.same({ eps = 1e-5, bias = false, mode = "a" }, options.check("f", { bias = false }, declared))
    end)

    it("names the nearest option", function()
        assert.error_matches(function() options.check("te.f", { epz = 1 }, declared) end,
            'te%.f: unknown option "epz", did you mean "eps"')
    end)

    it("names option, expectation and value", function()
        assert.error_matches(function() options.check("te.f", { eps = -1 }, declared) end,
            "te%.f: option eps: expected number, at least 0, got %-1")
        assert.error_matches(function() options.check("te.f", { eps = 0 / 0 }, declared) end, "option eps")
        assert.error_matches(function() options.check("te.f", { mode = "c" }, declared) end,
            'expected one of a, b, got "c"')
        assert.error_matches(function() options.check("te.f", { count = 0 }, declared) end, "positive integer")
        assert.error_matches(function() options.check("te.f", { count = 1.5 }, declared) end, "positive integer")
        assert.error_matches(function() options.check("te.f", 7, declared) end, "expected a table")
    end)

    it("finds the nearest name", function()
        assert.equal("learning_rate", options.nearest("leanring_rate", { "batch", "learning_rate" }))
        assert.is_nil(options.nearest("zzzzzzzz", { "batch" }))
    end)
end)
