/* consumer.c - another project's program, in the common part of C and C++. */
#include <tetrain/tetrain.h>

#include <stdio.h>
#include <string.h>

int main(void)
{
    const char  code[] = "local te = require 'te' x = te.ones {2, 3} * 2";
    tetrain    *rt = tetrain_open(NULL);
    int         good = rt && tetrain_run_string(rt, code, sizeof code - 1, "=consumer") == TETRAIN_OK;
    te_tensor  *x = good ? tetrain_get_tensor(rt, "x") : NULL;
    good = x && te_tensor_numel(x) == 6 && ((float *)te_tensor_data(x))[5] == 2 && strcmp(tetrain_version(), te_version()) == 0;
    te_tensor_release(x);
    tetrain_close(rt);
    printf("%s\n", good ? "good" : "bad");
    return !good;
}
