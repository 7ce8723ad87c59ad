// Python's lock, where a caller of NCCL holds it (an extension that does not release it).
//
// Who ends a wait of ours is a thread in Python, so no wait may keep the lock: it would last until it gives
// up.
#include <dlfcn.h>

#include "plugin.h"

// A function of Python by its public name, or by the one that it had before 3.13.
static void* function(const char* name, const char* before) {
  void* found = dlsym(RTLD_DEFAULT, name);
  return found != NULL ? found : dlsym(RTLD_DEFAULT, before);
}

void* dccl_let_go_of_python(void) {
  void* (*own)(void) = (void* (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
  void* (*holder)(void) =
      (void* (*)(void))function("PyThreadState_GetUnchecked", "_PyThreadState_UncheckedGet");
  int (*is_ending)(void) = (int (*)(void))function("Py_IsFinalizing", "_Py_IsFinalizing");
  void* (*save)(void) = (void* (*)(void))dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
  if (own == NULL || holder == NULL || is_ending == NULL || save == NULL) return NULL;
  // Not PyGILState_Check: before Python has begun, and with interpreters inside one another, it always says
  // yes.
  void* mine = own();
  if (mine == NULL || mine != holder()) return NULL;
  // A thread that asks for the lock of an interpreter that ends gets it never, or is ended with all that it
  // holds.
  return is_ending() ? NULL : save();
}

void dccl_take_python_back(void* state) {
  void (*restore)(void*) = (void (*)(void*))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
  if (state != NULL && restore != NULL) restore(state);
}
