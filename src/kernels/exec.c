/* exec.c - messages of kernels, the same in every backend. */
#include "kernels.h"

#include "numerals.h"

te_status te_exec_fail(te_exec *exec, te_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    te_vsnprintf(exec->message, sizeof exec->message, format, args);
    va_end(args);
    return status;
}
