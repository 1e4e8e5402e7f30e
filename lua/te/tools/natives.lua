--- te.tools.natives: the functions of `te` and methods of tensors that the engine's binding writes by hand, as rows of
--- { name, parameters, results, sentence }. Operations declare themselves and Lua functions carry annotations; a spec
--- holds these rows against the live module, both ways.

local OPTIONS = "opts?: te.TensorOptions"

return {
    functions = {
        { "tensor", "value: te.Tensor|number|boolean|table, " .. OPTIONS, "te.Tensor",
            "A tensor of a number, a nested table or a copy of a tensor; an integer dtype cuts fractions off." },
        { "empty", "shape: te.Shape, " .. OPTIONS, "te.Tensor", "A tensor whose values are not set." },
        { "zeros", "shape: te.Shape, " .. OPTIONS, "te.Tensor", "A tensor of zeros." },
        { "ones", "shape: te.Shape, " .. OPTIONS, "te.Tensor", "A tensor of ones." },
        { "full", "shape: te.Shape, value: number, " .. OPTIONS, "te.Tensor", "A tensor of one value." },
        { "eye", "n: integer, " .. OPTIONS, "te.Tensor", "The identity matrix of size n." },
        { "arange", "first: number, last: number, step?: number, " .. OPTIONS, "te.Tensor",
            "Numbers from first to last, which is included." },
        { "rand", "shape: te.Shape, " .. OPTIONS, "te.Tensor", "Random numbers, uniform in [0, 1), of 24 bits each." },
        { "randn", "shape: te.Shape, " .. OPTIONS, "te.Tensor",
            "Random numbers from the standard normal distribution, drawn as float32." },
        { "randint", "low: integer, high: integer, shape: te.Shape, " .. OPTIONS, "te.Tensor",
            "Random whole numbers from low to high, both included." },
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
        { "get_default_device", "", "string", "Where tensors are made that no device is named for." },
        { "devices", "", "string[]", "Names of the devices that can hold tensors." },
        { "is_tensor", "value: any", "boolean", "Whether value is a tensor." },
        { "ops_list", "", "table[]", "What every operation declares: name, signature, doc, params." },
        { "backward", "loss: te.Tensor, grad?: te.Tensor, opts?: table", "",
            "Adds the gradients of loss to the .grad of every leaf below it. opts: retain_graph." },
        { "grad", "outputs: te.Tensor|te.Tensor[], inputs: te.Tensor|te.Tensor[], opts?: table", "te.Tensor ...",
            "Gradients of outputs with respect to inputs, false for one that outputs do not depend on. They have no "
                .. "gradients themselves. opts: grad_outputs, retain_graph." },
    },
    methods = {
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
