/* prompt.h - the read-eval-print loop. */
#ifndef TETRAIN_PROMPT_H
#define TETRAIN_PROMPT_H

#include <tetrain/tetrain.h>

/* Reads and runs lines until the end of input; returns the exit status. catch_signals is called before each. */
int prompt_run(tetrain *rt, void (*catch_signals)(void));

#endif
