--- te.tools.natives: the functions of `te` and methods of tensors that the engine's binding writes by hand, as rows of
--- { name, parameters, results, sentence }. Operations declare themselves and Lua functions carry annotations; a spec
--- holds these rows against the live module, both ways.

local OPTIONS = "opts?: te.TensorOptions"

return {
    -- what te.TensorOptions has, and what shapes are
    options = {
        dtype = { "string", help = "default: float32, unless stated otherwise above" },
        device = { "string", help = "default: te.get_default_device() or, for _like functions, x's device" },
        requires_grad = { "boolean", false, help = "record gradients for it" },
    },
    shape = "sizes, { 2, 3 } or 2, 3",
    functions = {
        { "tensor", "value: te.Tensor|number|boolean|table, " .. OPTIONS, "te.Tensor",
            "A tensor from a number, a nested table or a copy of a tensor, which keeps its dtype; bool from booleans, "
                .. "else float32. An integer dtype cuts fractions off." },
        { "empty", "shape: te.Shape, " .. OPTIONS, "te.Tensor", "An uninitialized tensor." },
        { "zeros", "shape: te.Shape, " .. OPTIONS, "te.Tensor", "A tensor of zeros." },
        { "ones", "shape: te.Shape, " .. OPTIONS, "te.Tensor", "A tensor of ones." },
        { "full", "shape: te.Shape, value: number|boolean, " .. OPTIONS, "te.Tensor",
            "A tensor of one value; bool if that is a boolean." },
        { "empty_like", "x: te.Tensor, " .. OPTIONS, "te.Tensor",
            "An uninitialized tensor in x's shape, dtype and device." },
        { "zeros_like", "x: te.Tensor, " .. OPTIONS, "te.Tensor", "Zeros in x's shape, dtype and device." },
        { "ones_like", "x: te.Tensor, " .. OPTIONS, "te.Tensor", "Ones in x's shape, dtype and device." },
        { "full_like", "x: te.Tensor, value: number, " .. OPTIONS, "te.Tensor",
            "One value in x's shape, dtype and device." },
        { "eye", "n: integer, " .. OPTIONS, "te.Tensor", "The identity matrix of size n." },
        { "arange", "first: number, last?: number, step?: number, " .. OPTIONS, "te.Tensor",
            "Numbers from first to last, both included; te.arange(n) is 1 to n. int64 if first and step are integers, "
                .. "else float32." },
        { "rand", "shape: te.Shape, " .. OPTIONS, "te.Tensor", "Random numbers, uniform in [0, 1), 24 bits each." },
        { "randn", "shape: te.Shape, " .. OPTIONS, "te.Tensor",
            "Standard normal random numbers, drawn as float32." },
        { "rand_like", "x: te.Tensor, " .. OPTIONS, "te.Tensor",
            "Random numbers in x's shape, dtype and device, uniform in [0, 1)." },
        { "randn_like", "x: te.Tensor, " .. OPTIONS, "te.Tensor",
            "Standard normal random numbers in x's shape, dtype and device." },
        { "randint", "low: integer, high: integer, shape: te.Shape, " .. OPTIONS, "te.Tensor",
            "Random integers from low to high, both included, int64." },
        { "from_file", "path: string, dtype: te.Dtype, opts?: table", "te.Tensor",
            "The elements of a file, mapped and read-only: truncating the file meanwhile kills the process. opts: "
                .. "offset in bytes, count of elements, map = false to read it at once." },
        { "manual_seed", "seed: integer", "", "Sets the seed of the random numbers." },
        { "rng_state", "state?: string", "string",
            "Returns the state of the random numbers; with an argument, restores that state." },
        { "memory_stats", "device?: string", "te.MemoryStats",
            "Bytes in live tensors (current, peak), bytes taken from the system (reserved), blocks handed out." },
        { "reset_peak_memory", "", "", "Resets memory_stats().peak to what is in use." },
        { "empty_cache", "", "", "Returns memory that no tensor uses to the system." },
        { "set_num_threads", "n: integer", "",
            "Sets the threads of kernels; 0: OMP_NUM_THREADS, or all cores. Results do not depend on it." },
        { "get_num_threads", "", "integer", "Threads of the kernels." },
        { "synchronize", "device?: string", "", "Waits for a device, or all, to finish its queued work." },
        { "set_float32_matmul_precision", "precision: string", "",
            "\"highest\" keeps float32 in matrix products, \"high\" allows TF32 where a device has it." },
        { "get_float32_matmul_precision", "", "string", "What set_float32_matmul_precision set." },
        { "use_deterministic_algorithms", "mode: boolean", "",
            "true, the default: the same call gives the same bits. false: cuDNN sums gradients of attention in any "
            .. "order, which takes less time and memory." },
        { "are_deterministic_algorithms_enabled", "", "boolean", "What use_deterministic_algorithms set." },
        { "get_default_device", "", "string", "The device of new tensors where none is given." },
        { "devices", "", "string[]", "Names of the devices that can hold tensors." },
        { "is_tensor", "value: any", "boolean", "Whether value is a tensor." },
        { "ops_list", "", "table[]", "The declarations of all operations: name, signature, doc, params." },
        { "backward", "loss: te.Tensor, grad?: te.Tensor, opts?: table", "",
            "Adds the gradients of loss to the .grad of every leaf that it depends on. opts: retain_graph." },
        { "grad", "outputs: te.Tensor|te.Tensor[], inputs: te.Tensor|te.Tensor[], opts?: table", "te.Tensor ...",
            "Gradients of outputs with respect to inputs: for a list a list, with false for an input that outputs do "
                .. "not depend on; for a tensor its gradient or nil. They have no gradients themselves. opts: "
                .. "grad_outputs, retain_graph." },
    },
    -- what classes of one's own write, by the class that they extend
    written = {
        BasicOperation = {
            { "op_forward", "ctx: table, x: te.Tensor, ...: te.Tensor", "te.Tensor ...",
                "Returns y and the extra outputs for x and the extra inputs. ctx:save_for_backward(…) keeps tensors." },
            { "op_backward", "ctx: table, dy: te.Tensor, ...: te.Tensor", "te.Tensor, te.Tensor[], te.Tensor[]",
                "Returns dx, a list of the gradients of the operation's own parameters in order of registration, and "
                    .. "one of those of the extra inputs, false for none. ctx:saved_tensors() returns the kept "
                    .. "tensors; gradients of extra outputs follow dy. Without op_backward the tape records what "
                    .. "op_forward does." },
            { "lower", "g: table, x: any, ...: any", "any ...",
                "Describes the operation to the engine, so that it fuses with its neighbours: g:op(name, inputs, "
                    .. "attributes), g:param(self, field). Returns their result, or nil and the reason why not." },
        },
        FusedOperation = {
            { "fuser_forward", "ctxs: table[], x: te.Tensor, extra_inputs: te.Tensor[][]",
                "te.Tensor, te.Tensor[][]",
                "Returns y and the extra outputs, a list for each basic operation. ctxs[i] and extra_inputs[i] are "
                    .. "those of basic operation i." },
            { "fuser_backward", "ctxs: table[], dy: te.Tensor, extra_gradients: te.Tensor[][]",
                "te.Tensor, te.Tensor[][], te.Tensor[][]",
                "Returns dx, and the gradients of parameters and of extra inputs, a list for each basic operation. "
                    .. "Without fuser_backward the tape records what fuser_forward does." },
        },
    },
    methods = {
        { "backward", "grad?: te.Tensor, opts?: table", "",
            "Adds the gradients of this tensor to the .grad of every leaf that it depends on; grad is its own "
                .. "gradient, not needed for one element. opts: retain_graph, to allow another run." },
        { "size", "dim?: integer", "integer|integer[]", "The size of a dimension, or all sizes." },
        { "dim", "", "integer", "The number of dimensions." },
        { "numel", "", "integer", "The number of elements." },
        { "item", "", "number|boolean", "The value of a tensor of one element." },
        { "totable", "", "table|number|boolean", "The values as a nested table." },
        { "release", "", "", "Frees the memory now; the tensor must not be used again." },
        { "is_contiguous", "", "boolean", "Whether the elements are in order in memory, without gaps." },
        { "storage_id", "", "integer", "The same number for tensors that share memory." },
    },
}
