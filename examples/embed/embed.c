/* embed.c - trains a model that model.lua defines, on this program's own buffers.   embed [model.lua] */
#include <stdio.h>
#include <tetrain/tetrain.h>

enum { POINTS = 64, STEPS = 300 };
static float   x[POINTS][2]; /* the tensors below are these arrays: nothing is copied */
static int64_t inside[POINTS];

static int fail(tetrain *rt)
{
    fprintf(stderr, "%s\n", rt ? tetrain_error(rt) : "out of memory");
    tetrain_close(rt);
    return 1;
}

int main(int argc, char **argv)
{
    tetrain *rt = tetrain_open(NULL);
    if (!rt || tetrain_run_file(rt, argc > 1 ? argv[1] : "model.lua", 0, NULL) != TETRAIN_OK) return fail(rt);
    te_tensor *in[] = {te_tensor_from_data(tetrain_context(rt), x, TE_F32, 2, (int64_t[]){POINTS, 2}, NULL, NULL),
                       te_tensor_from_data(tetrain_context(rt), inside, TE_I64, 1, (int64_t[]){POINTS}, NULL, NULL)};
    te_tensor *loss;
    uint32_t   random = 1;
    for (int step = 1; step <= STEPS; step++) {
        for (int i = 0; i < POINTS; i++) {
            for (int k = 0; k < 2; k++)
                x[i][k] = (float)((random = random * 1664525 + 1013904223) >> 8) / (1 << 23) - 1;
            inside[i] = x[i][0] * x[i][0] + x[i][1] * x[i][1] < 0.5f;
        }
        if (tetrain_call(rt, "train_step", in, 2, &loss, 1) != TETRAIN_OK) return fail(rt);
        if (step == 1 || step == STEPS) printf("step %d: loss %.4f\n", step, *(float *)te_tensor_data(loss));
        te_tensor_release(loss);
    }
    for (int i = 0; i < 2; i++) te_tensor_release(in[i]);
    tetrain_close(rt);
    return 0;
}
