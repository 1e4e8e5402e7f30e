/* gemm_onednn_compat.c - descriptions, primitives and their execution in oneDNN 2 and 3. */
#ifdef TE_WITH_ONEDNN
#include "gemm_onednn_compat.h"

#include <string.h>

/* --- what differs between the versions ---------------------------------------------------------------------------- */

#if DNNL_VERSION_MAJOR >= 3

typedef const_dnnl_memory_desc_t desc_ref;

static desc_ref ref(const te_dnnl_desc *desc) { return desc->made ? desc->md : NULL; }

static dnnl_status_t init_strided(dnnl_memory_desc_t *md, const dnnl_dims_t dims, dnnl_data_type_t type,
                                  const dnnl_dims_t strides)
{
    return dnnl_memory_desc_create_with_strides(md, 2, dims, type, strides);
}

static dnnl_status_t init_any(dnnl_memory_desc_t *md, const dnnl_dims_t dims, dnnl_data_type_t type)
{
    return dnnl_memory_desc_create_with_tag(md, 2, dims, type, dnnl_format_tag_any);
}

static void make_copy(te_dnnl_desc *desc, desc_ref from)
{
    desc->made = dnnl_memory_desc_clone(&desc->md, from) == dnnl_success;
}

static void desc_free(te_dnnl_desc *desc)
{
    if (desc->made) dnnl_memory_desc_destroy(desc->md);
    desc->made = false;
}

static dnnl_status_t add_sum(dnnl_post_ops_t ops) { return dnnl_post_ops_append_sum(ops, 1, 0, dnnl_data_type_undef); }

static dnnl_status_t matmul_desc(const te_dnnl_matmul *t, const te_dnnl_desc *b, dnnl_engine_t engine,
                                 dnnl_primitive_attr_t attr, dnnl_primitive_desc_t *desc)
{
    return dnnl_matmul_primitive_desc_create(desc, engine, ref(&t->a), ref(b), ref(&t->bias), ref(&t->c), attr);
}

#else

typedef const dnnl_memory_desc_t *desc_ref;

static desc_ref ref(const te_dnnl_desc *desc) { return desc->made ? &desc->md : NULL; }

static dnnl_status_t init_strided(dnnl_memory_desc_t *md, const dnnl_dims_t dims, dnnl_data_type_t type,
                                  const dnnl_dims_t strides)
{
    return dnnl_memory_desc_init_by_strides(md, 2, dims, type, strides);
}

static dnnl_status_t init_any(dnnl_memory_desc_t *md, const dnnl_dims_t dims, dnnl_data_type_t type)
{
    return dnnl_memory_desc_init_by_tag(md, 2, dims, type, dnnl_format_tag_any);
}

static void make_copy(te_dnnl_desc *desc, desc_ref from)
{
    desc->md = *from;
    desc->made = true;
}

static void desc_free(te_dnnl_desc *desc) { desc->made = false; }

static dnnl_status_t add_sum(dnnl_post_ops_t ops) { return dnnl_post_ops_append_sum(ops, 1); }

static dnnl_status_t matmul_desc(const te_dnnl_matmul *t, const te_dnnl_desc *b, dnnl_engine_t engine,
                                 dnnl_primitive_attr_t attr, dnnl_primitive_desc_t *desc)
{
    dnnl_matmul_desc_t op;
    dnnl_status_t status = dnnl_matmul_desc_init(&op, ref(&t->a), ref(b), ref(&t->bias), ref(&t->c));
    return status == dnnl_success ? dnnl_primitive_desc_create(desc, &op, attr, engine, NULL) : status;
}

#endif

/* --- making ------------------------------------------------------------------------------------------------------- */

static dnnl_data_type_t type_of(int32_t dtype)
{
    switch (dtype) {
    case TE_F32: return dnnl_f32;
    case TE_BF16: return dnnl_bf16;
    case TE_F16: return dnnl_f16;
    default: return dnnl_data_type_undef;
    }
}

static void make_strided(te_dnnl_desc *desc, int64_t rows, int64_t cols, int32_t dtype, int64_t rs, int64_t cs)
{
    desc->made =
        init_strided(&desc->md, (dnnl_dims_t){rows, cols}, type_of(dtype), (dnnl_dims_t){rs, cs}) == dnnl_success;
}

static bool make_operands(te_dnnl_matmul *t, te_dnnl_desc *wanted_b, const te_dnnl_spec *s)
{
    make_strided(&t->a, s->m, s->k, s->in, s->a_rs, s->a_cs);
    make_strided(&t->plain_b, s->k, s->n, s->in, s->b_rs, s->b_cs);
    make_strided(&t->c, s->m, s->n, s->out, s->c_rs, 1);
    if (s->packed_b)
        wanted_b->made = init_any(&wanted_b->md, (dnnl_dims_t){s->k, s->n}, type_of(s->in)) == dnnl_success;
    else if (t->plain_b.made) make_copy(wanted_b, ref(&t->plain_b));
    if (s->bias != TE_DTYPE_COUNT) make_strided(&t->bias, 1, s->n, s->bias, s->n, 1);
    return t->a.made && t->plain_b.made && t->c.made && wanted_b->made && (t->bias.made || s->bias == TE_DTYPE_COUNT);
}

/* Scratchpads are the caller's, so that threads can run one primitive at the same time. */
static dnnl_primitive_attr_t make_attr(const te_dnnl_spec *s)
{
    dnnl_primitive_attr_t attr = NULL;
    dnnl_post_ops_t ops = NULL;
    bool good = dnnl_primitive_attr_create(&attr) == dnnl_success &&
                dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user) == dnnl_success;
    if (good && s->accumulate)
        good = dnnl_post_ops_create(&ops) == dnnl_success && add_sum(ops) == dnnl_success &&
               dnnl_primitive_attr_set_post_ops(attr, ops) == dnnl_success;
    if (ops) dnnl_post_ops_destroy(ops);
    if (good) return attr;
    if (attr) dnnl_primitive_attr_destroy(attr);
    return NULL;
}

static bool make_packer(te_dnnl_matmul *t, dnnl_engine_t engine)
{
    dnnl_primitive_desc_t desc = NULL;
    t->packed_bytes = dnnl_memory_desc_get_size(ref(&t->b));
    bool good =
        dnnl_reorder_primitive_desc_create(&desc, ref(&t->plain_b), engine, ref(&t->b), engine, NULL) == dnnl_success &&
        dnnl_primitive_create(&t->packer, desc) == dnnl_success;
    if (desc) dnnl_primitive_desc_destroy(desc);
    return good;
}

static bool make_primitive(te_dnnl_matmul *t, dnnl_engine_t engine, const te_dnnl_desc *wanted_b,
                           dnnl_primitive_attr_t attr)
{
    dnnl_primitive_desc_t desc = NULL;
    bool good = matmul_desc(t, wanted_b, engine, attr, &desc) == dnnl_success &&
                dnnl_primitive_create(&t->primitive, desc) == dnnl_success;
    if (good) {
        make_copy(&t->b, dnnl_primitive_desc_query_md(desc, dnnl_query_weights_md, 0));
        make_copy(&t->scratchpad, dnnl_primitive_desc_query_md(desc, dnnl_query_scratchpad_md, 0));
        good = t->b.made && t->scratchpad.made;
    }
    if (good) t->scratchpad_bytes = dnnl_memory_desc_get_size(ref(&t->scratchpad));
    if (desc) dnnl_primitive_desc_destroy(desc);
    return good;
}

bool te_dnnl_matmul_make(te_dnnl_matmul *t, dnnl_engine_t engine, const te_dnnl_spec *spec)
{
    te_dnnl_desc wanted_b = {.made = false};
    *t = (te_dnnl_matmul){.primitive = NULL};
    dnnl_primitive_attr_t attr = make_attr(spec);
    bool good = attr && make_operands(t, &wanted_b, spec) && make_primitive(t, engine, &wanted_b, attr) &&
                (!spec->packed_b || make_packer(t, engine));
    if (attr) dnnl_primitive_attr_destroy(attr);
    desc_free(&wanted_b);
    if (!good) te_dnnl_matmul_free(t);
    return good;
}

void te_dnnl_matmul_free(te_dnnl_matmul *t)
{
    te_dnnl_desc *descs[] = {&t->a, &t->b, &t->c, &t->bias, &t->scratchpad, &t->plain_b};
    for (size_t i = 0; i < sizeof descs / sizeof *descs; i++) desc_free(descs[i]);
    if (t->primitive) dnnl_primitive_destroy(t->primitive);
    if (t->packer) dnnl_primitive_destroy(t->packer);
    t->primitive = t->packer = NULL;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

typedef struct binding {
    int                 arg;
    const te_dnnl_desc *desc;
    void               *data;
} binding;

static bool execute(dnnl_primitive_t primitive, const te_dnnl_args *args, const binding *bindings, int n)
{
    dnnl_exec_arg_t bound[5];
    int made = 0;
    for (; made < n; made++) {
        const binding *b = &bindings[made];
        bound[made].arg = b->arg;
        if (dnnl_memory_create(&bound[made].memory, ref(b->desc), args->engine, b->data) != dnnl_success) break;
    }
    bool good = made == n && dnnl_primitive_execute(primitive, args->stream, n, bound) == dnnl_success &&
                dnnl_stream_wait(args->stream) == dnnl_success;
    while (made-- > 0) dnnl_memory_destroy(bound[made].memory);
    return good;
}

bool te_dnnl_matmul_run(const te_dnnl_matmul *t, const te_dnnl_args *args)
{
    binding bindings[5] = {
        {DNNL_ARG_SRC, &t->a, args->a}, {DNNL_ARG_WEIGHTS, &t->b, args->b}, {DNNL_ARG_DST, &t->c, args->c}};
    int n = 3;
    if (t->scratchpad_bytes) bindings[n++] = (binding){DNNL_ARG_SCRATCHPAD, &t->scratchpad, args->scratchpad};
    if (t->bias.made) bindings[n++] = (binding){DNNL_ARG_BIAS, &t->bias, args->bias};
    return execute(t->primitive, args, bindings, n);
}

bool te_dnnl_pack_b(const te_dnnl_matmul *t, const te_dnnl_args *args, void *packed)
{
    binding bindings[2] = {{DNNL_ARG_FROM, &t->plain_b, args->b}, {DNNL_ARG_TO, &t->b, packed}};
    return execute(t->packer, args, bindings, 2);
}

#else
typedef int te_gemm_onednn_compat_is_empty; /* a translation unit declares something */
#endif
