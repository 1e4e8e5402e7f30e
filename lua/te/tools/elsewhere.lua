--- te.tools.elsewhere: what names of PyTorch and Transformer Engine are here.

local MODULES = "modules and functions are reached through te: te.Linear, te.Sequential, te.softmax"
local DTYPES = "dtypes are strings: te.zeros({ 2 }, { dtype = \"float32\" }), x:to(\"bfloat16\")"
local DEVICES = "devices are strings: te.zeros({ 2 }, { device = \"cuda\" }), x:to(\"cuda\"); te.devices() lists them"
local LISTS = "tables of modules need no class: self.blocks = { te.Linear(2, 2), te.Linear(2, 2) }"
local NO_GRAD = "te.no_grad(function() … end)"
local FUSES = "te.Sequential and te.pointwise fuse what they run; te.graph records steps on a GPU"
local PRODUCTS = "te.matmul multiplies matrices and batches of them"
local SCHEDULES = "schedules are functions of the step: te.optim.cosine; or set optimizer.lr"
local SHAPES = "x.shape is a table, #x.shape or x:dim() its length"
local MODEL = "build it of te.Residual, te.LayerNorm, te.MultiHeadedSelfAttention, te.Linear, or take te.models.gpt"
local NORM_FIRST = "te.Sequential(te.LayerNorm(n), te.Linear(n, m)%s): the norm writes what the product reads"

-- Functions that are methods there as well.
local functions = {
    unbind = "x[i] for i = 1, #x", outer = "a:view { -1, 1 } * b:view { 1, -1 }",
    prod = "te.exp(te.sum(te.log(x), dim)) of positive numbers",
    cumprod = "te.exp(te.cumsum(te.log(x), dim)) of positive numbers",
    floor_divide = "te.floor(a:to(\"float64\") / b):to(\"int64\")",
    dot = "te.matmul(a, b) of two vectors", count_nonzero = "x:ne(0):sum()",
    isclose = "(a - b):abs():lt(1e-6)",
    allclose = "(a - b):abs():max():item() < 1e-6",
    bincount = "te.scatter_add(te.zeros(n), 1, ids, te.ones(ids.shape))",
    tile = "te.cat({ x, x }, dim)", ["repeat"] = "te.cat({ x, x }, dim)",
    repeat_interleave = "te.index_select(x, dim, te.floor(te.arange(0, k * n - 1) / k):to(\"int64\"))",
    median = "the middle one of te.sort(x, dim)", unique = "those of te.sort(x, dim) that differ from the one before",
}

--- Of te, te.optim and what else says that it has no such name.
local names = {
    nn = MODULES, functional = MODULES, pytorch = MODULES, torch = MODULES,
    common = "recipes are te.recipe.DelayedScaling {}, te.recipe.MXFP8BlockScaling {} and so on",
    Parameter = "te.zeros({ 2 }, { requires_grad = true }) is a parameter of the module in whose field it is",
    Tensor = "te.tensor makes tensors of numbers and tables", from_numpy = "te.load reads safetensors files",
    ModuleList = LISTS, ModuleDict = LISTS, ParameterList = LISTS,
    float = DTYPES, float16 = DTYPES, float32 = DTYPES, float64 = DTYPES, bfloat16 = DTYPES, half = DTYPES,
    int32 = DTYPES, int64 = DTYPES, long = DTYPES, uint8 = DTYPES, bool = DTYPES,
    cuda = DEVICES, device = DEVICES, set_default_device = DEVICES,
    inference_mode = NO_GRAD, set_grad_enabled = NO_GRAD,
    fuser = "containers fuse what they run: ?Sequential, ?explain, ?set_fusion",
    compile = FUSES, jit = FUSES, fx = FUSES,
    mm = PRODUCTS, bmm = PRODUCTS, addmm = PRODUCTS .. ", te.linear adds a bias",
    linspace = "te.arange(first, last, (last - first) / (n - 1))",
    meshgrid = "x:view { -1, 1 } and y:view { 1, -1 } broadcast",
    nll_loss = "te.cross_entropy(logits, targets)", leaky_relu = "te.maximum(x, 0.01 * x)",
    mish = "x * te.tanh(te.softplus(x))", elu = "te.where(x:gt(0), x, te.expm1(x))",
    cosine_similarity = "(te.l2_normalize(a) * te.l2_normalize(b)):sum(-1)",
    one_hot = "ids:unsqueeze(-1):eq(te.arange(0, n - 1)):to(\"int64\")",
    logical_and = "a * b of bool tensors", logical_or = "a + b of bool tensors",
    logical_xor = "a:ne(b) of bool tensors",
    amp = "te.autocast({ dtype = \"bfloat16\" }, function() … end)",
    utils = "there are te.data.open, te.checkpoint, te.optim.clip_grad_norm",
    lr_scheduler = SCHEDULES, LambdaLR = SCHEDULES, CosineAnnealingLR = SCHEDULES, StepLR = SCHEDULES,
    Adam = "te.optim.AdamW(parameters, { weight_decay = 0 })",
    ZeroRedundancyOptimizer = "te.distributed.shard_optimizer(optimizer)",
    RMSprop = "te.optim has AdamW, Muon and SGD", Adagrad = "te.optim has AdamW, Muon and SGD",
    Format = "formats are texts: te.recipe.DelayedScaling { fp8_format = \"HYBRID\" }",
    LayerNormLinear = NORM_FIRST:format(""),
    LayerNormMLP = NORM_FIRST:format(", te.GELU(), te.Linear(m, n)"),
    TransformerLayer = MODEL, TransformerEncoderLayer = MODEL, TransformerDecoderLayer = MODEL,
    MultiheadAttention = "te.MultiHeadedSelfAttention(width, heads), te.GroupedQueryAttention",
}

--- Of tensors and modules.
local methods = {
    cuda = "x:to(\"cuda\")", cpu = "x:to(\"cpu\")", float = "x:to(\"float32\")", double = "x:to(\"float64\")",
    half = "x:to(\"float16\")", bfloat16 = "x:to(\"bfloat16\")", long = "x:to(\"int64\")", int = "x:to(\"int32\")",
    type = "x.dtype, x:to(\"float32\")", requires_grad_ = "x.requires_grad = true", data = "x:detach()",
    numpy = "x:totable()", tolist = "x:totable()", T = "x:transpose(1, 2)", t = "x:transpose(1, 2)",
    ndim = SHAPES, mm = PRODUCTS, bmm = PRODUCTS,
    register_full_backward_hook = "y:register_hook(fn) of the result y, in a function for register_forward_hook",
}

for name, text in pairs(functions) do names[name], methods[name] = text, text end

return { names = names, methods = methods }
