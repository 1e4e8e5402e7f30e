--- te.tools.natives: the functions of `te` and methods of tensors that the engine's binding writes by hand, as rows of
--- { name, parameters, results, sentence }. Operations declare themselves and Lua functions carry annotations; a spec
--- holds these rows against the live module, both ways.

local OPTIONS = "opts?: te.TensorOptions"

return {
    -- what te.TensorOptions has, and what shapes are
    options = {
        dtype = { "string", help = "float32 unless given, where nothing else is said above" },
        device = { "string", help = "te.get_default_device() unless given, or where x is" },
        requires_grad = { "boolean", false, help = "whether gradients are recorded for it" },
    },
    shape = "sizes, { 2, 3 } or 2, 3",
    functions = {
        { "tensor", "value: te.Tensor|number|boolean|table, " .. OPTIONS, "te.Tensor",
            "A tensor of a number, a nested table or a copy of a tensor, which keeps its dtype; of booleans bool, else "
                .. "float32. An integer dtype cuts fractions off." },
        { "empty", "shape: te.Shape, " .. OPTIONS, "te.Tensor", "A tensor whose values are not set." },
        { "zeros", "shape: te.Shape, " .. OPTIONS, "te.Tensor", "A tensor of zeros." },
        { "ones", "shape: te.Shape, " .. OPTIONS, "te.Tensor", "A tensor of ones." },
        { "full", "shape: te.Shape, value: number|boolean, " .. OPTIONS, "te.Tensor",
            "A tensor of one value; bool where that is a boolean." },
        { "empty_like", "x: te.Tensor, " .. OPTIONS, "te.Tensor",
            "A tensor in x's shape, dtype and device whose values are not set." },
        { "zeros_like", "x: te.Tensor, " .. OPTIONS, "te.Tensor", "Zeros in x's shape, dtype and device." },
        { "ones_like", "x: te.Tensor, " .. OPTIONS, "te.Tensor", "Ones in x's shape, dtype and device." },
        { "full_like", "x: te.Tensor, value: number, " .. OPTIONS, "te.Tensor",
            "One value in x's shape, dtype and device." },
        { "eye", "n: integer, " .. OPTIONS, "te.Tensor", "The identity matrix of size n." },
        { "arange", "first: number, last?: number, step?: number, " .. OPTIONS, "te.Tensor",
            "Numbers from first to last, which is included; te.arange(n) is 1 to n. int64 where first and step are "
                .. "whole, else float32." },
        { "rand", "shape: te.Shape, " .. OPTIONS, "te.Tensor", "Random numbers, uniform in [0, 1), of 24 bits each." },
        { "randn", "shape: te.Shape, " .. OPTIONS, "te.Tensor",
            "Random numbers from the standard normal distribution, drawn as float32." },
        { "rand_like", "x: te.Tensor, " .. OPTIONS, "te.Tensor",
            "Random numbers in x's shape, dtype and device, uniform in [0, 1)." },
        { "randn_like", "x: te.Tensor, " .. OPTIONS, "te.Tensor",
            "Random numbers in x's shape, dtype and device, from the standard normal distribution." },
        { "randint", "low: integer, high: integer, shape: te.Shape, " .. OPTIONS, "te.Tensor",
            "Random whole numbers from low to high, both included, int64." },
        { "from_file", "path: string, dtype: te.Dtype, opts?: table", "te.Tensor",
            "The elements of a file, mapped and read-only: who shortens the file meanwhile ends the process. opts: "
                .. "offset in bytes, count of elements, map = false to read it at once." },
        { "manual_seed", "seed: integer", "", "Sets the seed of the random numbers." },
        { "rng_state", "state?: string", "string",
            "The state of the random numbers before; with an argument, goes back to that state." },
        { "memory_stats", "device?: string", "te.MemoryStats",
            "Bytes in live tensors (current, peak), bytes taken from the system (reserved), blocks handed out." },
        { "reset_peak_memory", "", "", "Lets memory_stats().peak begin again at what is in use." },
        { "empty_cache", "", "", "Gives memory that no tensor uses back to the system." },
        { "set_num_threads", "n: integer", "",
            "Threads of the kernels; 0: OMP_NUM_THREADS, or all cores. Results do not depend on it." },
        { "get_num_threads", "", "integer", "Threads of the kernels." },
        { "synchronize", "device?: string", "", "Waits for a device, or for all, to finish what was asked of it." },
        { "set_float32_matmul_precision", "precision: string", "",
            "\"highest\" keeps float32 in matrix products, \"high\" allows TF32 where a device has it." },
        { "get_float32_matmul_precision", "", "string", "What set_float32_matmul_precision set." },
        { "use_deterministic_algorithms", "mode: boolean", "",
            "true, as at first: the same call gives the same bits. false: cuDNN sums gradients of attention in any "
            .. "order, which takes less time and memory." },
        { "are_deterministic_algorithms_enabled", "", "boolean", "What use_deterministic_algorithms set." },
        { "get_default_device", "", "string", "Where tensors are made that no device is named for." },
        { "devices", "", "string[]", "Names of the devices that can hold tensors." },
        { "is_tensor", "value: any", "boolean", "Whether value is a tensor." },
        { "ops_list", "", "table[]", "What every operation declares: name, signature, doc, params." },
        { "backward", "loss: te.Tensor, grad?: te.Tensor, opts?: table", "",
            "Adds the gradients of loss to the .grad of every leaf below it. opts: retain_graph." },
        { "grad", "outputs: te.Tensor|te.Tensor[], inputs: te.Tensor|te.Tensor[], opts?: table", "te.Tensor ...",
            "Gradients of outputs with respect to inputs: of a list a list, false for an input that outputs do not "
                .. "depend on; of a tensor its gradient or nil. They have no gradients themselves. opts: "
                .. "grad_outputs, retain_graph." },
    },
    -- what classes of one's own write, by the class that they extend
    written = {
        BasicOperation = {
            { "op_forward", "ctx: table, x: te.Tensor, ...: te.Tensor", "te.Tensor ...",
                "Returns y and the extra outputs of x and the extra inputs. ctx:save_for_backward(…) keeps tensors." },
            { "op_backward", "ctx: table, dy: te.Tensor, ...: te.Tensor", "te.Tensor, te.Tensor[], te.Tensor[]",
                "Returns dx, a list with the gradients of the operation's own parameters in the order of their "
                    .. "registration, and one with those of the extra inputs, false for none. ctx:saved_tensors() "
                    .. "returns what op_forward kept; behind dy come gradients of extra outputs. Without op_backward "
                    .. "the tape sees what op_forward does." },
            { "lower", "g: table, x: any, ...: any", "any ...",
                "Describes the operation to the engine, so that it fuses with its neighbours: g:op(name, inputs, "
                    .. "attributes), g:param(self, field). Returns what they return, or nil and why it cannot." },
        },
        FusedOperation = {
            { "fuser_forward", "ctxs: table[], x: te.Tensor, extra_inputs: te.Tensor[][]",
                "te.Tensor, te.Tensor[][]",
                "Returns y and, in a list for each basic operation, extra outputs. ctxs[i] and extra_inputs[i] are "
                    .. "those of basic operation i." },
            { "fuser_backward", "ctxs: table[], dy: te.Tensor, extra_gradients: te.Tensor[][]",
                "te.Tensor, te.Tensor[][], te.Tensor[][]",
                "Returns dx and, in a list for each basic operation, gradients of its parameters and of its extra "
                    .. "inputs. Without fuser_backward the tape sees what fuser_forward does." },
        },
    },
    methods = {
        { "backward", "grad?: te.Tensor, opts?: table", "",
            "Adds the gradients of this tensor to the .grad of every leaf below it; grad is that of the tensor, which "
                .. "one of one element does without. opts: retain_graph, whether it may run again." },
        { "size", "dim?: integer", "integer|integer[]", "The size of a dimension, or all sizes." },
        { "dim", "", "integer", "How many dimensions there are." },
        { "numel", "", "integer", "How many elements there are." },
        { "item", "", "number|boolean", "The value of a tensor of one element." },
        { "totable", "", "table|number|boolean", "The values as a nested table." },
        { "release", "", "", "Gives the memory back now; the tensor must not be used again." },
        { "is_contiguous", "", "boolean", "Whether the elements lie in memory in order, without gaps." },
        { "storage_id", "", "integer", "The same number for tensors that share memory." },
    },
}
